# What the plans for a card share; sourced in the repository's root by a script that has set `out`.
mkdir -p "$out"
export PYTHONPATH=worker:shared
python=${PYTHON:-python3}
status=0

part() { # NAME COMMAND...
  local name=$1; shift
  echo "== $name"
  "$@" > "$out/$name.log" 2>&1 || { status=1; echo "failed"; }
  tail -n "${LINES_SHOWN:-25}" "$out/$name.log"
}
