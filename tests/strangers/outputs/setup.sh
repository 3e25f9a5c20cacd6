cp "$LOOP" loop.py
git init -q && git add . && git commit -qm first
touch logs/earlier.log
