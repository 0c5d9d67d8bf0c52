package iptables

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// nftKernel is the nftables backend.
//
// The process's table belongs to the socket conn: the kernel removes it when
// that closes, so conn is kept to the end, and nothing but transactions goes
// through it. Nobody else can change such a table. Where the kernel cannot do
// that (before 5.12) the table is an ordinary one, whose rules rest when the
// sockets have gone, and it is compared and repaired like the fallback.
type nftKernel struct {
	conn  *netlink.Conn
	owner bool
	// lookupCounts: see RuleSet. No probe without a packet can tell.
	lookupCounts bool
	// inCharge tells whether what processes share is ours to keep.
	inCharge func() bool
	look     func() (*ruleset, error)
	// spare is for ensure to look with when no socket can be had: that is a reason to
	// withdraw, which therefore must not need one.
	spare *ruleset

	slot       int
	armed      []Service          // of the rule set that was applied last
	bypasses   time.Time          // when the last bypass ends
	tables     map[string]carried // what we have put into the kernel
	generation uint32             // of the ruleset when it was last compared
}

// carried is a table in the kernel.
type carried struct {
	text string // as we meant it
	// as the kernel shows it; nil for one that nobody else can change, or if
	// somebody was between our writing and our look
	image []byte
}

// newNFTKernel opens the socket that the table of the process in a slot will
// belong to.
func newNFTKernel(slot int, owner bool, inCharge func() bool) (*nftKernel, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("connect to nftables: %w", err)
	}
	spare, err := openRuleset()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &nftKernel{
		conn: conn, slot: slot, owner: owner, lookupCounts: kernelSince(5, 7),
		inCharge: inCharge, look: openRuleset, spare: spare, tables: make(map[string]carried),
	}, nil
}

// kernelSince reports whether the running kernel calls itself so or newer.
func kernelSince(major, minor int) bool {
	var name unix.Utsname
	if unix.Uname(&name) != nil {
		return false
	}
	return releaseSince(unix.ByteSliceToString(name.Release[:]), major, minor)
}

// releaseSince compares for example "6.1.0-18-amd64".
func releaseSince(release string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n < 2 {
		return false
	}
	return a > major || a == major && b >= minor
}

func (k *nftKernel) close() error {
	var err error
	if _, ours := k.tables[tableName(k.slot)]; ours && !k.owner {
		var b batch
		b.remove(tableName(k.slot))
		err = b.commit(k.conn)
	}
	return errors.Join(err, k.spare.Close(), k.conn.Close())
}

func (k *nftKernel) ensure(rs RuleSet) (repaired bool, err error) {
	r, err := k.look()
	switch {
	case err == nil:
		defer func() { _ = r.Close() }()
	case noSockets(err):
		r = k.spare
		// Of a dump that broke off.
		defer func() { err = errors.Join(err, discard(r.Conn)) }()
	default:
		return false, err
	}
	generation, err := r.generation()
	if err != nil {
		return false, err
	}
	rs.bypassing, rs.lookupCounts = time.Now().Before(k.bypasses), k.lookupCounts
	process := rs.process(k.owner)
	fallback, want := rs.fallback()
	if k.tables[process.name].text == process.String() && generation == k.generation &&
		(!want || k.tables[fallbackName].text == fallback.String()) {
		return false, nil
	}
	disarmed := k.disarmed(rs)
	repaired, err = k.carry(r, process, disarmed)
	if err != nil {
		return repaired, err
	}
	k.armed = rs.armed
	if err := k.bury(r, disarmed); err != nil {
		return repaired, err
	}
	again, err := k.carryFallback(r, fallback, want, rs.cfg.Provisional)
	if err != nil {
		return repaired || again, err
	}
	// That of before the comparison: whoever came after it, we ourselves too, has
	// it done again.
	k.generation = generation
	return repaired || again, nil
}

// disarmed returns the services that the rule set no longer has armed.
func (k *nftKernel) disarmed(rs RuleSet) []Service {
	return slices.DeleteFunc(slices.Clone(k.armed), func(s Service) bool { return slices.Contains(rs.armed, s) })
}

// carry makes the kernel carry a table.
func (k *nftKernel) carry(r *ruleset, t table, disarmed []Service) (repaired bool, err error) {
	now, exists, err := r.table(t.name)
	if err != nil {
		return false, err
	}
	had, ours := k.tables[t.name]
	text := t.String()
	if ours && had.text == text {
		if exists {
			if now.owned {
				return false, nil // nobody else can change it
			}
			image, err := r.image(&t)
			if err != nil {
				return false, err
			}
			if image != nil && bytes.Equal(image, had.image) {
				return false, nil
			}
		}
		repaired = true
	}
	var b batch
	if exists && !ours { // a predecessor's
		b.remove(t.name)
	}
	b.assert(&t)
	b.dropAlive(t.name, disarmed)
	if err := b.commit(k.conn); err != nil {
		return false, fmt.Errorf("apply table %s: %w", t.name, err)
	}
	c := carried{text: text}
	if !t.owner {
		if c.image, err = r.image(&t); err != nil {
			return repaired, err
		}
	}
	k.tables[t.name] = c
	return repaired, nil
}

// dropAlive takes services out of @alive.
func (b *batch) dropAlive(table string, services []Service) {
	for fam := range 2 {
		var gone []element
		for _, s := range ofFamily(services, fam) {
			gone = append(gone, element{key: serviceKey(s), timeout: time.Second})
		}
		b.drop(table, setName(setAlive, fam), gone)
	}
}

// bury takes services out of @alive for good: a packet that was on its way
// through the old rules may have renewed one behind the transaction's back.
func (k *nftKernel) bury(r *ruleset, services []Service) error {
	if len(services) == 0 {
		return nil
	}
	// The transaction has ended when we look, so there is one such time at most.
	for range 2 {
		left, err := r.alive(k.slot, services)
		if err != nil || len(left) == 0 {
			return err
		}
		var b batch
		b.dropAlive(tableName(k.slot), services)
		if err := b.commit(k.conn); err != nil {
			return fmt.Errorf("withdraw services: %w", err)
		}
	}
	return nil
}

// carryFallback keeps the table that outlives the process, unless a newer
// process does, or there is a predecessor's that may know more.
func (k *nftKernel) carryFallback(r *ruleset, t table, want, provisional bool) (repaired bool, err error) {
	if !k.inCharge() {
		delete(k.tables, fallbackName)
		return false, nil
	}
	if _, ours := k.tables[fallbackName]; provisional && !ours {
		if _, exists, err := r.table(fallbackName); err != nil || exists {
			return false, err
		}
	}
	if want {
		return k.carry(r, t, nil)
	}
	delete(k.tables, fallbackName)
	if _, exists, err := r.table(fallbackName); err != nil || !exists {
		return false, err
	}
	var b batch
	b.remove(fallbackName)
	if err := b.commit(k.conn); err != nil {
		return false, fmt.Errorf("remove table %s: %w", fallbackName, err)
	}
	return false, nil
}

func (k *nftKernel) alive(services []Service) (map[Service]time.Duration, error) {
	r, err := openRuleset()
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	return r.alive(k.slot, services)
}

func (k *nftKernel) taken() (map[Client]uint64, error) {
	r, err := openRuleset()
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	out := make(map[Client]uint64)
	err = r.everyMember(k.slot, setTaken, func(m member) { out[m.client] = m.packets })
	return out, err
}

// bypass fills the set; ensure makes the rules look into it, if they do not.
func (k *nftKernel) bypass(clients map[Client]time.Duration) error {
	var b batch
	end := k.bypasses
	for fam := range 2 {
		var list []element
		for c, d := range clients {
			if family(c.Addr) == fam {
				list = append(list, element{key: clientKey(c), timeout: d})
			}
			if e := time.Now().Add(d); e.After(end) {
				end = e
			}
		}
		b.put(tableName(k.slot), setName(setBypass, fam), list)
	}
	if err := b.commit(k.conn); err != nil {
		return fmt.Errorf("bypass clients: %w", err)
	}
	k.bypasses = end
	return nil
}
