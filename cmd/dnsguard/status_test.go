package main

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dnsguard/dnsguard/ctguard"
	"github.com/dnsguard/dnsguard/internal/config"
)

// TestStatusGuard: what /statusz says of the guard.
func TestStatusGuard(t *testing.T) {
	for _, tt := range []struct {
		name   string
		stats  ctguard.Stats
		kernel ctguard.KernelStats
		cfg    config.Guard
		want   string
	}{
		{
			name: "at work",
			stats: ctguard.Stats{
				State: ctguard.Guarding, Flows: map[ctguard.Verdict]int{ctguard.Live: 7, ctguard.Held: 1},
				Deleted: map[ctguard.Reason]uint64{ctguard.EndpointGone: 3, ctguard.Untranslated: 1}, DeletedEarly: 2, Recreated: 4, Refused: 5,
				Errors: map[ctguard.Op]uint64{ctguard.OpDump: 6}, EventsLost: 8, Sweeps: 9, LastSweep: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
				Silent: []netip.AddrPort{netip.MustParseAddrPort("10.244.0.3:5353"), netip.MustParseAddrPort("10.244.0.4:5353")},
				Gone:   2, Known: 10, KnownLeftOut: 11,
			},
			kernel: ctguard.KernelStats{Dumps: 12, Interrupted: 1, Messages: 13, Bytes: 14},
			want: `guard: the guard watches the flows to the watched Services
: flows 7 live, 1 held, 0 stale; 10 known, 11 left out
: deleted: endpoint-gone 3, untranslated 1
: 2 deleted at the news, 4 re-created, 5 put off; 0 sockets of our own retired
: believed dead: 10.244.0.3:5353, 10.244.0.4:5353
: 2 frontends vanished not long ago
: errors: dump 6
: 9 sweeps, the last 2026-01-02T03:04:05Z; events lost 8 times
: the kernel filters dumps and deletions as far as is known; 12 dumps, 1 of them interrupted, 13 messages, 14 bytes
`,
		},
		{
			name:   "idle, for want of translated flows",
			stats:  ctguard.Stats{State: ctguard.Untouched},
			kernel: ctguard.KernelStats{NoDeleteFilter: true},
			cfg:    config.Guard{DryRun: true, Evidence: true},
			want: `guard: idle: the guard has seen no translated flow to a watched Service: nothing is deleted (dry run) (with evidence)
: flows 0 live, 0 held, 0 stale; 0 known, 0 left out
: deleted: ` + `
: 0 deleted at the news, 0 re-created, 0 put off; 0 sockets of our own retired
: 0 sweeps, the last never; events lost 0 times
: the kernel filters dumps, not deletions; 0 dumps, 0 of them interrupted, 0 messages, 0 bytes
`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b strings.Builder
			newStatusGuard(tt.stats, tt.kernel, tt.cfg).write(func(name, format string, args ...any) {
				fmt.Fprintf(&b, "%s: %s\n", name, fmt.Sprintf(format, args...))
			})
			if diff := cmp.Diff(tt.want, b.String()); diff != "" {
				t.Errorf("status (-want +got):\n%s", diff)
			}
		})
	}
}

// TestStatusIdle: every state in which there is nothing to do says so, and why.
func TestStatusIdle(t *testing.T) {
	for _, s := range []ctguard.State{ctguard.Waiting, ctguard.NoService, ctguard.Unseen, ctguard.Untouched, ctguard.IPVS, ctguard.Guarding} {
		g := newStatusGuard(ctguard.Stats{State: s}, ctguard.KernelStats{}, config.Guard{})
		if want := s != ctguard.Waiting && s != ctguard.Guarding; g.Idle != want || g.Message == "" {
			t.Errorf("%v: idle %v, message %q", s, g.Idle, g.Message)
		}
	}
}
