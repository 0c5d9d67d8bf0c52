package iptables

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Cleanup removes everything that this package may have left in the kernel,
// whatever was configured then: tables of either backend, the fallback of
// link-local addresses, the table of Accounting, routing rules and routes. It
// returns how many things it removed, and ErrRunning without touching any if a
// living process intercepts or has the kernel count. Doing it twice is no error.
func Cleanup() (removed int, err error) {
	for n := range slots {
		held, err := slotHeld(n)
		if err != nil {
			return 0, err
		}
		if held {
			return 0, ErrRunning
		}
	}
	if living, err := accountingLives(); err != nil || living {
		return 0, cmp.Or(err, ErrRunning)
	}
	none := func(int) bool { return false }
	tables, err := removeTables(func(t tableInfo) bool {
		return t.name == fallbackName || slotOf(t.name) >= 0 || isAccounting(t.name)
	})
	chains, xtErr := removeChains(runProgram, none)
	routes, routeErr := routing{}.prune()
	return tables + chains + routes, errors.Join(err, xtErr, routeErr)
}

// accountingLives reports whether a process has a table of Accounting.
func accountingLives() (bool, error) {
	tables, err := listTables(openRuleset)
	return slices.ContainsFunc(tables, func(t tableInfo) bool { return isAccounting(t.name) && t.owned }), err
}

// listTables lists the tables of family inet. A kernel without nftables has none.
func listTables(open func() (*ruleset, error)) (tables []tableInfo, err error) {
	r, err := open()
	if err == nil {
		defer func() { _ = r.Close() }()
		tables, err = r.allTables()
	}
	if errors.Is(nftSupport(err), ErrNotSupported) {
		return nil, nil
	}
	return tables, err
}

// removeLeftovers removes what dead predecessors left that would still act:
// nftables tables that nobody owns, and iptables chains; and a fallback that
// the backend does not keep.
func removeLeftovers(own int, b Backend) error {
	living := func(n int) bool {
		if n == own {
			return false // whoever had the name before us is dead
		}
		held, err := slotHeld(n)
		return held || err != nil
	}
	_, err := removeTables(func(t tableInfo) bool {
		dead := !t.owned && slotOf(t.name) >= 0 && !living(slotOf(t.name))
		return dead || b == IPTables && t.name == fallbackName
	})
	// Every chain of ours uses xt_recent, so a list of it gives them away:
	// programs need not be started to find that there are none.
	if lists, e := os.ReadDir("/proc/thread-self/net/xt_recent"); e == nil {
		for _, l := range lists {
			if strings.HasPrefix(l.Name(), "dnsguard") {
				_, xtErr := removeChains(runProgram, living)
				return errors.Join(err, xtErr)
			}
		}
	}
	return err
}

// slotOf returns the slot that a table's name belongs to, -1 if none.
func slotOf(name string) int {
	for n := range slots {
		if name == tableName(n) {
			return n
		}
	}
	return -1
}

// removeTables removes the tables that match.
func removeTables(match func(tableInfo) bool) (int, error) {
	tables, err := listTables(openRuleset)
	if err != nil || len(tables) == 0 {
		return 0, err
	}
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, fmt.Errorf("connect to nftables: %w", err)
	}
	defer func() { _ = c.Close() }()
	removed := 0
	for _, t := range tables {
		if !match(t) {
			continue
		}
		var b batch
		b.remove(t.name)
		switch err := b.commit(c); {
		case err == nil:
			removed++
		case !errors.Is(err, unix.ENOENT):
			return removed, err
		}
	}
	return removed, nil
}

// removeChains removes the iptables chains of slots that do not live. Without
// the programs there can be none, nor of a family that the kernel lacks.
func removeChains(run program, living func(slot int) bool) (int, error) {
	k := &xtKernel{run: run}
	removed := 0
	var errs []error
	for fam := range 2 {
		n, err := k.removeChains(fam, living)
		removed += n
		errs = append(errs, err)
	}
	return removed, errors.Join(errs...)
}

func (k *xtKernel) removeChains(fam int, living func(slot int) bool) (int, error) {
	if !kernelHas(fam) {
		return 0, nil
	}
	saved, err := k.save(fam)
	if errors.Is(err, exec.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	keep := func(chain string) bool {
		n, err := strconv.Atoi(strings.Split(strings.TrimPrefix(chain, chainPrefix+"-"), "-")[0])
		if err != nil {
			n = 0 // the first slot's have no number
		}
		return living(n)
	}
	text := removal(saved, keep)
	if text == "" {
		return 0, nil
	}
	if err := k.restore(fam, text); err != nil {
		return 0, fmt.Errorf("remove iptables rules: %w", err)
	}
	return strings.Count(text, "-X "), nil
}

// kernelHas reports whether the kernel has a family at all. IPv6 it can lack (the
// boot parameter ipv6.disable=1); then programs for it fail.
func kernelHas(fam int) bool {
	fd, err := unix.Socket([2]int{unix.AF_INET, unix.AF_INET6}[fam], unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return !errors.Is(err, unix.EAFNOSUPPORT)
}
