cp "$LOOP" loop.py
python data/tiny/prepare.py
git init -q && git add . && git commit -qm first
