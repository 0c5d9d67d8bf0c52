package lab

import (
	"context"
	"io"
)

// RoleEnv names the environment variable that makes the test binary, started
// as a child, play a role instead of running tests.
const RoleEnv = "DNSGUARD_LAB_TEST_ROLE"

// PlayHalf plays the second half of the incident alone.
func PlayHalf(ctx context.Context, out io.Writer, exe string) error {
	_, err := playHalf(ctx, &story{out: out}, "half", "dns-a", exe)
	return err
}
