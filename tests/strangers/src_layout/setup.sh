cp "$LOOP" src/lines/loop.py
git init -q && git add . && git commit -qm first
