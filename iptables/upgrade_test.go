package iptables

import (
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// TestUpgrade lets a newcomer take over from a process that serves, under
// load, and also while the old one was stalled.
func TestUpgrade(t *testing.T) {
	for _, v := range variants(t)[:1] {
		for _, stall := range []time.Duration{0, 100 * time.Millisecond} {
			t.Run(v.name+", stalled "+stall.String(), func(t *testing.T) {
				s := newScene(t)
				cfg := agentConfig{Config: clusterIPConfig(), Sockets: 2, Steer: true}
				old := startAgent(t, s.Node.Namespace, cfg)
				old.awaitTaking(4)
				const length, rate = 3 * time.Second, 400 / slack
				streams := s.streams(variant{}, rate, length)
				for _, st := range streams {
					// glibc's: on a busy machine the newcomer needs a second to
					// start, and so long the stalled process's queue waits.
					st.load.Timeout = 5 * time.Second
				}
				before := upstream(s)
				wait := run(t, streams)
				<-time.After(length / 4)
				if stall > 0 { // what arrives meanwhile waits in its queues
					old.signal(syscall.SIGSTOP)
					<-time.After(stall)
				}
				young := startAgent(t, s.Node.Namespace, cfg)
				young.awaitTaking(4)
				tables := command(t, s.Node.Namespace, "", "nft", "list", "tables")
				if !strings.Contains(tables, "inet dnsguard\n") || !strings.Contains(tables, "inet dnsguard-1\n") {
					t.Errorf("tables while both live:\n%s", tables)
				}
				if stall > 0 {
					old.signal(syscall.SIGCONT)
				}
				// Long enough to read what has gathered, also on a busy machine.
				old.call("Leave", 200*time.Millisecond+5*stall, nil)
				old.call("Close", struct{}{}, nil)
				old.kill()
				settled := false
				young.call("Settle", struct{}{}, &settled)
				if !settled {
					t.Error("the predecessor has gone, but the newcomer has not settled")
				}
				wait()
				for _, st := range streams {
					if n := st.result.Failed(); n > 0 {
						t.Errorf("%s: %d queries lost", st.name, n)
					}
				}
				// A stall may have lasted longer than AliveTimeout in the end.
				if n := upstream(s) - before; n > 0 && stall == 0 {
					t.Errorf("%d queries took the kube-proxy path", n)
				}
				// The routing is shared: the old one's end must not take it.
				wantFrom(t, s.pod.Namespace, "udp", vip4, true)
				if n := young.stats().Repairs; n > 0 {
					t.Errorf("the newcomer had to repair %d times", n)
				}
			})
		}
	}
}

// TestHungPredecessor: once a newcomer steers, a predecessor that hangs gets
// nothing, and its end loses nothing.
func TestHungPredecessor(t *testing.T) {
	s := newScene(t)
	cfg := agentConfig{Config: clusterIPConfig(), Sockets: 2, Steer: true}
	old := startAgent(t, s.Node.Namespace, cfg)
	old.awaitTaking(4)
	old.signal(syscall.SIGSTOP)
	young := startAgent(t, s.Node.Namespace, cfg)
	young.awaitTaking(4)
	streams := s.streams(variant{}, 200/slack, 2*time.Second)
	wait := run(t, streams)
	<-time.After(time.Second)
	old.kill()
	wait()
	for _, st := range streams {
		if n := st.result.Failed(); n > 1 { // in the microseconds of the exit
			t.Errorf("%s: %d queries lost", st.name, n)
		}
	}
}

// TestSteeringSurvivesClosings closes the old sockets one by one while every
// query must reach the new ones: the kernel moves sockets within the group.
func TestSteeringSurvivesClosings(t *testing.T) {
	for _, sizes := range [][2]int{{1, 1}, {2, 2}, {4, 2}, {2, 4}} {
		s := newScene(t)
		var old, young *Sockets
		in(t, s.Node.Namespace, func() (err error) {
			if old, err = Listen(t.Context(), vip4, ListenConfig{UDP: sizes[0], TCP: sizes[0]}); err != nil {
				return err
			}
			if young, err = Listen(t.Context(), vip4, ListenConfig{UDP: sizes[1], TCP: sizes[1]}); err != nil {
				return err
			}
			if err := young.Steer(); err != nil {
				return err
			}
			if n, err := countGroup(UDP, vip4); n != sizes[0]+sizes[1] || err != nil {
				t.Errorf("%d sockets are in the group, %v", n, err)
			}
			return leave(old)
		})
		in(t, s.Node.Namespace, func() error {
			_, _, err := mustRuleSet(t, withProbe(clusterIPConfig())).routing().ensure()
			return err
		})
		// Without the rest of the interception: marked packets go to the sockets.
		command(t, s.Node.Namespace, `
			table inet marking {
				chain c { type filter hook prerouting priority -300; ip daddr 10.96.0.10 notrack meta mark set 0x10; }
			}`, "nft", "-f", "-")
		asked := 0
		everyYoung := func(what string) {
			for range 40 {
				asked++
				sendDatagram(t, s.pod.Namespace, vip4)
			}
			got := drain(t, young)
			if lost := drain(t, old); lost != 0 || got != 40 {
				t.Errorf("%v, %s: %d datagrams of 40 reached the new sockets, %d the old", sizes, what, got, lost)
			}
		}
		everyYoung("steered")
		for i, c := range old.UDP {
			_ = c.Close()
			old.UDP[i] = nil
			everyYoung("closed one")
		}
		old.UDP = nil
		in(t, s.Node.Namespace, func() error {
			if done, err := young.Settle(); done || err != nil {
				t.Errorf("settled while old listeners are open: %v, %v", done, err)
			}
			if err := old.Close(); err != nil {
				return err
			}
			done, err := young.Settle()
			if !done {
				t.Error("not settled although only new sockets are left")
			}
			return err
		})
		everyYoung("settled")
		if err := young.Close(); err != nil {
			t.Error(err)
		}
	}
}

func withProbe(c Config) Config {
	c.Probe = probeQuery()
	return c
}

func sendDatagram(t *testing.T, ns *lab.Namespace, to netip.AddrPort) {
	t.Helper()
	c, err := ns.Dial(t.Context(), "udp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(probeQuery()); err != nil {
		t.Fatal(err)
	}
}

// drain counts what waits in the sockets' queues: on a veth a datagram is
// there when the send returns.
func drain(t *testing.T, s *Sockets) int {
	t.Helper()
	n := 0
	buf := make([]byte, 512)
	for _, c := range s.UDP {
		if c == nil {
			continue
		}
		for {
			if err := c.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if _, _, err := c.ReadFromUDPAddrPort(buf); err != nil {
				break
			}
			n++
		}
	}
	return n
}
