package iptables

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// accountingName starts the names of the tables that have the kernel count. More
// than one process may want one: the next has a number.
const accountingName = "dnsguard-accounting"

// accountingTables is how many processes can have one.
const accountingTables = slots

func accountingTableName(n int) string {
	if n == 0 {
		return accountingName
	}
	return fmt.Sprintf("%s-%d", accountingName, n)
}

func isAccounting(name string) bool {
	return name == accountingName || strings.HasPrefix(name, accountingName+"-")
}

// accountingTable is the table that has the kernel count: to check its rule, the
// kernel turns accounting on in the network namespace. No packet meets it, since
// no hook leads there.
func accountingTable(n int, owner bool) table {
	return table{
		name: accountingTableName(n), owner: owner,
		chains: []chain{{name: "count", rules: []rule{{hasPackets{}, back()}}}},
	}
}

// AccountingText is the table of Accounting as nft would read it.
func AccountingText() string {
	t := accountingTable(0, true)
	return t.String()
}

// Accounting has the kernel count the packets of the flows that it tracks from
// now on, by a table with a rule that asks for the count (Linux 4.8): a process
// in a container may not write the sysctl net.netfilter.nf_conntrack_acct. The
// kernel sets that sysctl then, and does not take it back when the table goes.
//
// It works beside either backend, and without any. Its methods must not be
// called at the same time.
type Accounting struct {
	conn  *netlink.Conn
	name  string // of the table, empty if there is none yet
	owner bool   // the kernel removes the table with the process
}

// Ensure makes the kernel count if it does not, and reports whether it had to. It
// costs a read of the sysctl otherwise, and is to be called now and then: others
// may write the sysctl. The error wraps ErrNotSupported where the kernel has no
// nftables; the sysctl has to be set there.
func (a *Accounting) Ensure() (changed bool, err error) {
	counts, err := accounts()
	if err != nil {
		return false, err
	}
	there, err := a.there()
	if err != nil || counts && there {
		return false, err
	}
	if a.conn == nil {
		if a.conn, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
			return false, fmt.Errorf("count packets of flows: %w", nftSupport(err))
		}
	}
	if there { // the sysctl was written: only a new rule has it set again
		var b batch
		b.remove(a.name)
		if err := b.commit(a.conn); err != nil {
			return false, fmt.Errorf("count packets of flows: %w", err)
		}
		a.name = ""
	}
	if err := a.add(); err != nil {
		return false, fmt.Errorf("count packets of flows: %w", err)
	}
	if counts, err = accounts(); err == nil && !counts {
		err = errors.New("count packets of flows: the kernel does not turn net.netfilter.nf_conntrack_acct on")
	}
	return true, err
}

// add puts the table into the kernel, under the first name that no other
// process has; and takes over what one left that is dead.
func (a *Accounting) add() error {
	var last error
	for n := range accountingTables {
		for _, owner := range []bool{true, false} {
			t := accountingTable(n, owner)
			var b batch
			b.assert(&t)
			err := b.commit(a.conn)
			if err == nil {
				a.name, a.owner = t.name, owner
				return nil
			}
			last = err
			if errors.Is(err, fs.ErrPermission) {
				break // another process's, or we may nothing at all
			}
			if last = nftSupport(err); !errors.Is(last, ErrNotSupported) {
				return last
			}
		}
		if !errors.Is(last, fs.ErrPermission) {
			break
		}
	}
	return last
}

// there tells whether our table is in the kernel. Nobody else can remove one
// that we own.
func (a *Accounting) there() (bool, error) {
	if a.name == "" || a.owner {
		return a.name != "", nil
	}
	r, err := openRuleset()
	if err != nil {
		return false, err
	}
	defer func() { _ = r.Close() }()
	_, exists, err := r.table(a.name)
	return exists, err
}

// Close removes the table. The kernel goes on counting. Closing twice is no
// error.
func (a *Accounting) Close() error {
	if a.conn == nil {
		return nil
	}
	var err error
	if there, e := a.there(); e == nil && there && !a.owner {
		var b batch
		b.remove(a.name)
		err = b.commit(a.conn)
	}
	err = errors.Join(err, a.conn.Close())
	*a = Accounting{}
	return err
}

// accounts reports whether the kernel counts the packets of new flows in the
// calling thread's network namespace. Without conntrack there is no file, and
// the rule that asks for the count loads it.
func accounts() (bool, error) {
	text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_acct")
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("does the kernel count packets of flows: %w", err)
	}
	return strings.TrimSpace(string(text)) != "0", nil
}
