#!/usr/bin/env bash
# Builds the image of deploy/Containerfile from the binaries of scripts/dist.sh, for both
# architectures, with buildah and without a registry: bin/dnsguard-image.tar, an OCI
# archive of this machine's architecture, and what is in it. Needs root and buildah.
#
#   IMAGE=localhost/dnsguard:dev   its name
set -euo pipefail
cd "$(dirname "$0")/.."

image=${IMAGE:-localhost/dnsguard:dev}
store=$(mktemp -d)
trap 'run umount --all >/dev/null 2>&1; rm -rf "$store"' EXIT
# Of its own, so that nothing of this machine's images is touched, or needed.
run() { buildah --storage-driver vfs --root "$store/root" --runroot "$store/run" "$@"; }

if ! run bud --quiet --isolation chroot --platform linux/amd64,linux/arm64 --manifest "$image" \
	-f deploy/Containerfile bin >"$store/log" 2>&1; then
	cat "$store/log" >&2
	exit 1
fi
run manifest inspect "$image" | awk -F'"' '$2 == "architecture" { print "image for", $4 }'

container=$(run from --pull-never "$image")
run run --isolation chroot "$container" dnsguard version
files=$(cd "$(run mount "$container")" && find . -type f ! -path './etc/*')
if [ "$files" != ./usr/bin/dnsguard ]; then
	printf 'image: holds more than the binary:\n%s\n' "$files" >&2
	exit 1
fi
rm -f bin/dnsguard-image.tar
run push --quiet "$image" "oci-archive:bin/dnsguard-image.tar:$image" >/dev/null
stat -c '%n %s bytes' bin/dnsguard-image.tar
