package lab

import (
	"context"
	"io"
)

// RoleEnv names the environment variable that makes the test binary, started
// as a child, play a role instead of running tests.
const RoleEnv = "DNSGUARD_LAB_TEST_ROLE"

// PlayAct plays the last act of the incident alone.
func PlayAct(ctx context.Context, out io.Writer, exe string) error {
	a := &act{story: &story{out: out}, title: "act", mode: whole, victim: "dns-a"}
	return a.perform(ctx, exe)
}
