#!/bin/sh
# The other engine of bench_peers.py on the widened pair: build_peers.sh FOLDER [VENV]
#   FOLDER/env                      LiteRT-LM 0.18.1, with what exports its files (at most 2.4 GB)
#   FOLDER/pair, FOLDER/bundle      the widened reference pair, and its bundle for both backends
#   FOLDER/litert-lm-int4, -int8    the pair with its drafter as LiteRT-LM reads it
# VENV (.venv) has edge-mtp[all,train]. What is there is kept.
set -eu
cd "$(dirname "$0")/../.."
folder=${1:?name the folder}
venv=${2:-.venv}
mkdir -p "$folder"

if [ ! -x "$folder/env/bin/litert-lm" ]; then
    python3 -m venv "$folder/env"
    "$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.22.2 litert-torch==0.10.0 litert-lm-builder==0.18.1 \
        litert-lm-api==0.18.1 litert-lm==0.18.1
fi
export HF_HUB_OFFLINE=1
if [ ! -d "$folder/pair" ]; then
    "$venv/bin/python" scripts/pairs/widen_pair.py exporter/edge_export/reference_pair -o "$folder/pair" --intermediate 49152 --vocabulary 65536
fi
if [ ! -d "$folder/bundle" ]; then
    "$venv/bin/edge-export" pair "$folder/pair/target" "$folder/pair/drafter" -o "$folder/bundle" --format both --no-calibrate
fi
for type in int4 int8; do
    if [ ! -f "$folder/litert-lm-$type/model.litertlm" ]; then
        "$folder/env/bin/python" scripts/pairs/export_litert_pair.py "$folder/pair/target" "$folder/pair/drafter" "$folder/litert-lm-$type" \
            --recipe "dynamic_wi${type#int}_afp32" >"$folder/litert-lm-$type.log" 2>&1 || { tail -5 "$folder/litert-lm-$type.log" >&2; exit 1; }
    fi
done
echo "the engine is in $folder; measure with: $venv/bin/python scripts/benchmarks/bench_peers.py $folder/bundle --peers $folder --runs FILE"
