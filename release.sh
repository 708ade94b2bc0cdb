#!/usr/bin/env bash
# Builds what is given to others, from a clean checkout, into target/dist: the wheel, an archive with the same binary, and the book.
#
#     ./release.sh [--no-book]      needs cargo, Python with venv, and for the book mdbook (cargo install mdbook)
#
# Both have the stripped binary, completions for three shells, and manual pages. It is linked by zig against glibc 2.28, so that it starts on what
# clusters have since 2018 (RHEL 8, Debian 11): bench/scripts/old-glibc.sh looks.
set -euo pipefail
cd "$(dirname "$0")"

if [ -n "$(git status --porcelain)" ]; then
    echo "release.sh: the checkout has changes; commit or stash them first" >&2
    exit 1
fi
if [ "${1:-}" != --no-book ] && ! command -v mdbook >/dev/null; then
    echo "release.sh: no mdbook: cargo install mdbook, or leave the book out by --no-book" >&2
    exit 1
fi

out=$PWD/target/dist
rm -rf "$out" && mkdir -p "$out"
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT

# The wheel with the binary alone: pyproject.toml.
python3 -m venv "$work/python"
"$work/python/bin/pip" install --quiet --disable-pip-version-check 'maturin[zig]>=1.9,<2' wheel
PATH=$work/python/bin:$PATH "$work/python/bin/maturin" build --release --zig --compatibility manylinux_2_28 --out "$work/wheel"
"$work/python/bin/wheel" unpack --dest "$work/unpacked" "$work"/wheel/*.whl >/dev/null
tree=("$work"/unpacked/*) data=("$work"/unpacked/*/*.data)
binary=${data[0]}/scripts/lockstep
chmod +x "$binary"

# What the binary says of itself goes with it.
share=${data[0]}/data/share
mkdir -p "$share/man/man1" "$share/bash-completion/completions" "$share/zsh/site-functions" "$share/fish/vendor_completions.d"
"$binary" man --out "$share/man/man1" >/dev/null
"$binary" completions bash >"$share/bash-completion/completions/lockstep"
"$binary" completions zsh >"$share/zsh/site-functions/_lockstep"
"$binary" completions fish >"$share/fish/vendor_completions.d/lockstep.fish"
"$work/python/bin/wheel" pack --dest-dir "$out" "${tree[0]}" >/dev/null

name=lockstep-$("$binary" --version | cut -d' ' -f2)-$(uname -m)-linux
mkdir -p "$work/$name/bin"
cp "$binary" "$work/$name/bin/" && cp -r "$share" README.md LICENSE-* "$work/$name/"
tar --sort=name --owner=0 --group=0 --mtime="@$(git log -1 --format=%ct)" -C "$work" -czf "$out/$name.tar.gz" "$name"

if [ "${1:-}" != --no-book ]; then
    mdbook build docs --dest-dir "$out/book" 2>&1 | tee "$work/book.log"
    if grep -q WARN "$work/book.log"; then
        echo "release.sh: the book has warnings" >&2
        exit 1
    fi
fi

cd "$out" && sha256sum ./*.whl ./*.tar.gz >SHA256SUMS && ls -lh
