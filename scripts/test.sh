#!/usr/bin/env bash
# Runs every test there is: vet, unit and kernel tests, the same under the race
# detector, each fuzz target for a moment, what is deployed (manifests, chart, alerts,
# both architectures' binaries), and the Kubernetes end-to-end module.
# Full output goes to .cache/test/STAGE.log; the terminal gets go test's closing lines.
#
#   FUZZTIME=4s    how long each fuzz target runs
#   STAGES="..."   a subset of: vet unit race fuzz deploy e2e
set -euo pipefail
cd "$(dirname "$0")/.."

fuzztime=${FUZZTIME:-4s}
stages=${STAGES:-vet unit race fuzz deploy e2e}
logs=.cache/test
mkdir -p "$logs"

# Tests that need the kernel make their own network namespaces, which takes root.
# As root none of them may hide behind a skip.
if [ "$(id -u)" -eq 0 ]; then
	export DNSGUARD_REQUIRE_KERNEL=1
else
	echo "test: not root, so the kernel tests will be skipped; CI runs them all" >&2
fi

# run STAGE COMMAND...: a go test -v, shown in brief, in full for what failed.
run() {
	local stage=$1 log=$logs/$1.log rc=0
	shift
	"$@" >"$log" 2>&1 || rc=$?
	grep -E '^(ok|FAIL|\?|PASS|panic:|--- FAIL|fatal error:)' "$log" | grep -v 'no test files' || true
	if [ "$rc" -ne 0 ]; then
		echo "test: stage $stage failed; all of its output is in $log, what failed said:" >&2
		awk -f scripts/failures.awk "$log" | tail -n 300 >&2
		exit 1
	fi
	# Fuzz seeds may skip what their target cannot judge; a test may not. Under the race
	# detector, tests of losses under load do: the unit stage has run them.
	if [ -n "${DNSGUARD_REQUIRE_KERNEL:-}" ] && [[ $stage != race* ]] && grep -qE '^ *--- SKIP: Test' "$log"; then
		echo "test: stage $stage skipped tests, and here none may be:" >&2
		grep -E -A 3 '^ *--- SKIP: Test' "$log" >&2
		exit 1
	fi
}

stage_vet() {
	go vet ./...
}

# One package at a time: kernel tests count what is lost under load, and two of them
# at once on two cores measure each other.
stage_unit() {
	twice unit . -p 1 -timeout 20m
}

# Here nothing is counted that a neighbour could spoil.
stage_race() {
	twice race . -p 2 -timeout 20m -race
}

# twice STAGE MODULE FLAG...: every test of a module, and once more those that failed.
# What is counted under load depends on a machine that others use too; what fails twice
# is broken. A first failure stays in the output.
twice() {
	local stage=$1 module=$2 package names
	shift 2
	if (run "$stage" go test -C "$module" -count=1 -v "$@" ./...); then
		return
	fi
	awk -f scripts/failed.awk "$logs/$stage.log" >"$logs/$stage.failed"
	if [ ! -s "$logs/$stage.failed" ] || grep -q '^WARNING: DATA RACE' "$logs/$stage.log"; then
		exit 1
	fi
	while read -r package names; do
		echo "test: stage $stage: once more: $package $names"
		run "$stage-again" go test -C "$module" -count=1 -v "$@" -run "^($names)\$" "$package" </dev/null
	done <"$logs/$stage.failed"
}

stage_fuzz() {
	local package target
	# go test -list prints the names of a package's targets, then "ok PACKAGE TIME".
	go test -list '^Fuzz' ./... | awk '
		/^Fuzz/ { targets[n++] = $1 }
		/^ok/   { for (i = 0; i < n; i++) print $2, targets[i]; n = 0 }
	' >"$logs/fuzz.targets"
	while read -r package target; do
		echo "fuzz $fuzztime: $package $target"
		if ! (fuzz "$package" "$target"); then
			# What is found is an input, and kept. Without one it was go test itself, which
			# now and then takes the end of the time for a failure.
			if grep -q 'Failing input written' "$logs/fuzz-$target.log"; then
				exit 1
			fi
			echo "fuzz: no input was found: once more: $package $target"
			fuzz "$package" "$target"
		fi
	done <"$logs/fuzz.targets"
}

fuzz() {
	run "fuzz-$2" go test -run '^$' -fuzz "^$2\$" -fuzztime "$fuzztime" "$1" </dev/null
}

# The binaries that are shipped, for both architectures, built twice; the image with
# them; and a module of its own, with Helm's, kustomize's and Prometheus's libraries.
# Two to three minutes of two free cores when nothing is built yet (300 s of CPU), seconds
# later.
stage_deploy() {
	scripts/dist.sh --verify
	if [ -n "${DNSGUARD_REQUIRE_KERNEL:-}" ]; then # root, as buildah wants it
		scripts/image.sh
	fi
	run deploy go test -C deploy -count=1 -timeout 10m -v ./...
}

stage_e2e() {
	twice e2e e2e -timeout 30m
}

for stage in $stages; do
	begin=$SECONDS
	echo "== $stage"
	"stage_$stage"
	echo "== $stage passed in $((SECONDS - begin)) s"
done
