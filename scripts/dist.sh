#!/usr/bin/env bash
# Builds what is shipped: static binaries for amd64 and arm64, bin/dnsguard-linux-ARCH,
# and prints their sizes and digests. The same source, version and Go give the same
# bytes on any machine; with --verify both are built twice, in two directories, and
# compared.
#
#   VERSION=v0.1.0   what `dnsguard version` says
set -euo pipefail
cd "$(dirname "$0")/.."

version=${VERSION:-$(git describe --tags --always --dirty 2>/dev/null || echo unknown)}

# build DIRECTORY ARCH FILE
build() {
	(cd "$1" && CGO_ENABLED=0 GOOS=linux GOARCH=$2 GOAMD64=v1 GOARM64=v8.0 GOFLAGS='' GOWORK=off \
		go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$version" -o "$3" ./cmd/dnsguard)
}

source=$PWD
if [ "${1:-}" = --verify ]; then
	copies=$(mktemp -d)
	trap 'rm -rf "$copies"' EXIT
	# Of one moment, whatever is edited meanwhile.
	source=$copies/one
	mkdir "$source"
	tar -cf - go.mod go.sum cmd ctguard internal iptables resolver | tar -xf - -C "$source"
	cp -r "$source" "$copies/other"
fi

mkdir -p bin
for arch in amd64 arm64; do
	build "$source" "$arch" "$PWD/bin/dnsguard-linux-$arch"
done
(cd bin && stat -c '%n %s bytes' dnsguard-linux-* && sha256sum dnsguard-linux-*)

if [ "${1:-}" = --verify ]; then
	for arch in amd64 arm64; do
		file=bin/dnsguard-linux-$arch
		build "$copies/other" "$arch" "$copies/$arch"
		if ! cmp "$file" "$copies/$arch"; then
			echo "dist: two builds for $arch differ" >&2
			exit 1
		fi
		# The binary lists its own parts, and does not need a libc.
		if ! go version -m "$file" | grep -q "^	dep	k8s.io/client-go	"; then
			echo "dist: $file does not list its modules" >&2
			exit 1
		fi
		if head -c 4096 "$file" | grep -qa ld-linux; then
			echo "dist: $file is not static" >&2
			exit 1
		fi
	done
	echo "dist: two builds of each are the same, byte for byte"
fi
