#!/usr/bin/env bash
# Installs the Debian packages that a make target needs, and only those that are
# missing. Usage: scripts/deps.sh test|lint|bench
set -euo pipefail

case "${1:-}" in
test)
	# gcc and libc6-dev: the race detector. nftables, iptables, conntrack, iproute2:
	# independent witnesses of what our netlink code did to the kernel. musl-tools,
	# libc-ares-dev, busybox, dnsutils: the resolvers whose search-list walk we must
	# agree with. unbound: a real recursive server behind the forwarder. buildah: builds
	# the image without a registry.
	packages=(make git ca-certificates gcc libc6-dev nftables iptables conntrack
		iproute2 musl-tools libc-ares-dev busybox dnsutils unbound procps buildah)
	;;
lint)
	packages=(make git ca-certificates gcc libc6-dev shellcheck)
	;;
bench)
	# The peers that bench/run measures, and what compiles the load generator.
	packages=(make git gcc libc6-dev iproute2 unbound dnsdist knot-resolver
		pdns-recursor dnsmasq-base)
	;;
*)
	echo "usage: $0 test|lint|bench" >&2
	exit 2
	;;
esac

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
	echo "deps: not a Debian system; install the equivalents of: ${packages[*]}" >&2
	exit 0
fi

missing=()
for p in "${packages[@]}"; do
	status=$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null || true)
	[ "$status" = installed ] || missing+=("$p")
done
if [ ${#missing[@]} -eq 0 ]; then
	exit 0
fi

if [ "$(id -u)" -ne 0 ]; then
	echo "deps: missing packages; as root run: apt-get install --no-install-recommends ${missing[*]}" >&2
	exit 1
fi

# The servers among the packages are started by tests, in namespaces; Debian would
# also start them as services, on the machine's own port 53. policy-rc.d forbids that
# for the length of the installation.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod +x "$policy"
	trap 'rm -f "$policy"' EXIT
fi

echo "deps: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt=(apt-get -qq -o Acquire::Retries=3 -o Dpkg::Use-Pty=0)
log=$(mktemp)
if ! { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
	cat "$log" >&2
	rm -f "$log"
	echo "deps: apt-get could not install: ${missing[*]}" >&2
	exit 1
fi
rm -f "$log"

# On a machine with systemd, keep them from starting at the next boot as well.
if [ -d /run/systemd/system ]; then
	for p in "${missing[@]}"; do
		case "$p" in
		unbound | dnsdist | pdns-recursor) systemctl disable --quiet "$p" || true ;;
		knot-resolver) systemctl disable --quiet kresd@1 kres-cache-gc || true ;;
		esac
	done
fi
