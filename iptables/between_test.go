package iptables

import (
	"bytes"
	"errors"
	"iter"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// spy is a ruleset's socket that tells before a request and after its answer.
type spy struct {
	*netlink.Conn
	request netlink.Message
	tell    func(request netlink.Message, answered bool)
}

func (s *spy) Send(m netlink.Message) error {
	s.request = m
	s.tell(m, false)
	_, err := s.Conn.Send(m)
	return err
}

func (s *spy) SendMessages(m []netlink.Message) error {
	_, err := s.Conn.SendMessages(m)
	return err
}

func (s *spy) ReceiveIter() iter.Seq2[netlink.Message, error] {
	return func(yield func(netlink.Message, error) bool) {
		all, err := s.Receive()
		s.tell(s.request, true)
		for _, m := range all {
			m.Header.Flags &^= netlink.Multi // the last part has been read
			if !yield(m, nil) {
				return
			}
		}
		if err != nil {
			yield(netlink.Message{}, err)
		}
	}
}

// TestSomebodyBetween flushes everything at the worst moments: between our
// writing a table and looking how the kernel shows it, and behind the last look.
// Neither may make what is left the state that is wanted.
func TestSomebodyBetween(t *testing.T) {
	asks := func(kind uint16, of string) func(netlink.Message) bool {
		return func(m netlink.Message) bool {
			return uint16(m.Header.Type) == unix.NFNL_SUBSYS_NFTABLES<<8|kind && bytes.Contains(m.Data, cstring(of))
		}
	}
	for _, moment := range []struct {
		name     string
		request  func(netlink.Message) bool
		answered bool
		first    bool // with the first writing
		owner    bool
	}{
		{"fallback just written", asks(unix.NFT_MSG_GETRULE, fallbackName), false, true, true},
		{"process's table just written", asks(unix.NFT_MSG_GETRULE, "dnsguard"), false, true, false},
		{"fallback just compared", asks(unix.NFT_MSG_GETCHAIN, "postrouting"), true, false, true},
	} {
		t.Run(moment.name, func(t *testing.T) {
			ns := labtest.NewNamespace(t, "node")
			rs := mustRuleSet(t, testConfig())
			v := variant{backend: NFTables}
			in(t, ns, func() error {
				k, err := newNFTKernel(0, moment.owner, func() bool { return true })
				if err != nil {
					return err
				}
				defer func() { _ = k.close() }()
				armed := moment.first
				k.look = func() (*ruleset, error) {
					conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
					if err != nil {
						return nil, err
					}
					return &ruleset{netlink.NewConn(&spy{Conn: conn, tell: func(m netlink.Message, answered bool) {
						if armed && answered == moment.answered && moment.request(m) {
							armed = false
							command(t, ns, "", "nft", "flush", "ruleset")
						}
					}}, 0)}, nil
				}
				want := ""
				if !moment.first {
					_, err := k.ensure(rs)
					if err != nil {
						return err
					}
					want = state(t, ns, v)
					k.generation = 0 // somebody else has changed something
					armed = true
				}
				if _, err := k.ensure(rs); err != nil {
					return err
				}
				if armed {
					t.Fatal("the moment did not come")
				}
				got := repairedOnce(t, ns, v, k, rs)
				if want != "" && got != want || !strings.Contains(got, "chain postrouting") {
					t.Errorf("left:\n%s\nwant:\n%s", got, want)
				}
				return nil
			})
		})
	}
}

// repairedOnce finds the rules in need of repair, and then at rest. It returns what
// they are once repaired.
func repairedOnce(t *testing.T, ns *lab.Namespace, v variant, k kernel, rs RuleSet) string {
	t.Helper()
	if repaired, err := k.ensure(rs); err != nil || !repaired {
		t.Errorf("next: %v, %v", repaired, err)
	}
	got := state(t, ns, v)
	for range 2 {
		if repaired, err := k.ensure(rs); err != nil || repaired {
			t.Errorf("at rest: %v, %v", repaired, err)
		}
	}
	return got
}

// TestMembersInAnyOrder: the kernel shows the members of a set in the order of its
// hash table, which it rebuilds whenever it likes, and in as many messages.
func TestMembersInAnyOrder(t *testing.T) {
	message := func(members ...string) netlink.Message {
		b := new(batch)
		var list []netlink.Attribute
		for _, m := range members {
			list = append(list, nested(unix.NFTA_LIST_ELEM, b, netlink.Attribute{Type: unix.NFTA_SET_ELEM_KEY, Data: []byte(m)}))
		}
		b.add("", unix.NFT_MSG_NEWSETELEM, 0, nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, b, list...))
		return b.messages[0]
	}
	image := func(messages ...netlink.Message) string {
		out, err := appendMembers([]byte("before"), "local4", messages)
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	one := image(message("10.96.0.10 udp", "10.96.0.10 tcp"), message("169.254.20.10 udp"))
	if other := image(message("169.254.20.10 udp", "10.96.0.10 tcp", "10.96.0.10 udp")); other != one {
		t.Errorf("%q and %q", one, other)
	}
	if fewer := image(message("169.254.20.10 udp", "10.96.0.10 tcp")); fewer == one {
		t.Error("a member that is missing makes no difference")
	}
}

// TestXTSomebodyBetween is the same for iptables.
func TestXTSomebodyBetween(t *testing.T) {
	for _, v := range variants(t)[1:] {
		for _, moment := range []struct {
			name  string
			after string // the program that has just run, for IPv6
			first bool
		}{
			{"just written", restoreProgram(1), true},
			{"just compared", saveProgram(1), false},
		} {
			t.Run(v.name+"/"+moment.name, func(t *testing.T) {
				ns := labtest.NewNamespace(t, "node")
				rs := mustRuleSet(t, v.config())
				in(t, ns, func() error {
					really := inDirectory(v.path)
					armed := false
					k, err := newXTKernel(func(name, stdin string, args ...string) (string, error) {
						out, err := really(name, stdin, args...)
						if armed && name == moment.after {
							armed = false
							for fam := range 2 {
								_, e := really(restoreProgram(fam), "*raw\nCOMMIT\n")
								err = errors.Join(err, e)
							}
						}
						return out, err
					}, rs)
					if err != nil {
						return err
					}
					want := ""
					if !moment.first {
						for range 2 { // ours, and nobody since
							if _, err := k.ensure(rs); err != nil {
								return err
							}
						}
						want = state(t, ns, v)
						k.compared = k.compared.Add(-compareEvery)
					}
					armed = true
					if _, err := k.ensure(rs); err != nil {
						return err
					}
					if armed {
						t.Fatal("the moment did not come")
					}
					got := repairedOnce(t, ns, v, k, rs)
					if want != "" && got != want || strings.Count(got, "-j "+chainsOf(0).query) != 2 {
						t.Errorf("left:\n%s\nwant:\n%s", got, want)
					}
					return k.close()
				})
			})
		}
	}
}
