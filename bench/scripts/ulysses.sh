#!/usr/bin/env bash
# Ulysses (parallel.context = "a2a") on ranks that share a GPU, against one rank: 25 s.
# usage: bench/scripts/ulysses.sh LOCKSTEP > bench/records/ulysses.txt
set -euo pipefail
lockstep=$(realpath "${1:?usage: bench/scripts/ulysses.sh LOCKSTEP}")
cd "$(mktemp -d)"
layouts="cp=2,context=a2a;cp=4,context=a2a;cp=2,context=a2a,tp=2,sp;dp=2,cp=2,context=a2a,zero=3;cp=2,context=a2a,pp=2;cp=2,context=ring"
config() { # NAME MODEL SEQ KEYS
    printf '[model]\nvocab_size = 509\nlayers = 4\ndim = 256\nheads = 8\nkv_heads = 4\nffn = 512\n%b\n[train]\nseq = %s\nglobal_batch = 8\nmicro_batch = 2\n%b\n' "$2" "$3" "$4" > "$1.toml"
}
config fp32 '' 64 ''
config bf16 'head_dim = 64' 512 '[precision]\npolicy = "bf16"'
config odd 'architecture = "qwen3"\nhead_dim = 20' 96 '[precision]\npolicy = "bf16"'
config documents 'head_dim = 64' 512 '[data]\ndocument_mask = true\n[precision]\npolicy = "bf16"'
config window 'architecture = "mistral"\nsliding_window = 100\nhead_dim = 64' 512 '[recompute]\npolicy = "full"\n[precision]\npolicy = "bf16"'
for name in fp32 bf16 odd documents window; do
    echo "## $name"
    timeout 60 "$lockstep" verify "$name.toml" --device cuda --full-size --steps 2 --layouts "$layouts" 2> "$name.log" || { tail -20 "$name.log"; exit 1; }
done
