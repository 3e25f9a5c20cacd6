git init -q && git add . && git commit -qm first
