package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// programTimeout bounds a run of iptables-restore, and lockSeconds its
	// wait for the lock, which kube-proxy holds for seconds on large clusters.
	programTimeout = 15 * time.Second
	lockSeconds    = "5"
	// compareEvery is how often the rules are read although their number and
	// size have not changed (a read starts a process).
	compareEvery = 10 * time.Second
	// lockTaken is the exit status RESOURCE_PROBLEM of iptables.
	lockTaken = 4
)

// program runs one program to its end and returns its output.
type program func(name, stdin string, args ...string) (stdout string, err error)

// runProgram is the program that starts processes.
func runProgram(name, stdin string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), programTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("run %s: %w: %s", name, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.String(), nil
}

// xtKernel is the iptables backend: chains in table raw that iptables-restore
// writes. What nftables can do and it cannot:
//
//   - Rules do not end with the process. They rest, since -m socket finds no
//     socket and -m recent no answer.
//   - Clients in the host's network are not taken: their packets could only be
//     taken blindly, for up to AliveTimeout after our death. They keep the
//     kube-proxy path.
//   - A link-local address that nobody takes leads nowhere: there is no
//     rewrite without connection tracking. Give pods kube-dns as second
//     nameserver, or intercept the ClusterIP only.
//   - Clients that cannot reach us are not noticed: exclude them.
//   - AliveTimeout counts in whole seconds.
//   - To withdraw it has to start programs, for which there must be descriptors.
//   - Removal by others is noticed at the next check, up to a second later.
type xtKernel struct {
	run    program
	legacy bool // the variant without nftables below
	now    func() time.Time

	slot     int
	timeout  time.Duration // AliveTimeout as it is counted
	carried  [2]xtCarried
	compared time.Time
	mark     changeMark

	mu     sync.Mutex
	seen   map[Service]lastAnswer
	looked time.Time // when alive was last asked
}

// xtCarried is what the kernel has of one family.
type xtCarried struct {
	text  string // as it was fed
	image string // as iptables-save shows it, or xtDisturbed
}

// lastAnswer is when xt_recent's stamp for a service last moved.
type lastAnswer struct {
	stamp string    // in the kernel's ticks
	moved time.Time // at the earliest
}

// newXTKernel prepares for the process in a slot.
func newXTKernel(run program, rs RuleSet) (*xtKernel, error) {
	version, err := run(restoreProgram(0), "", "--version")
	if err != nil {
		return nil, err
	}
	return &xtKernel{
		run: run, legacy: !strings.Contains(version, "nf_tables"), now: time.Now,
		slot: rs.slot, timeout: time.Duration(rs.aliveSeconds()) * time.Second,
		seen: make(map[Service]lastAnswer),
	}, nil
}

func (k *xtKernel) restore(fam int, text string) error {
	_, err := k.run(restoreProgram(fam), text, "--noflush", "-w", lockSeconds)
	return err
}

func (k *xtKernel) save(fam int) (string, error) {
	return k.run(saveProgram(fam), "", "-t", "raw")
}

func (k *xtKernel) ensure(rs RuleSet) (repaired bool, err error) {
	k.forget(rs.armed)
	mark, err := readChangeMark(k.legacy)
	if err != nil {
		return false, err
	}
	unchanged := mark == k.mark && k.now().Sub(k.compared) < compareEvery
	for fam := range 2 {
		text := ""
		if rs.covers(fam) {
			text = rs.restoreText(fam)
		}
		if unchanged && k.carried[fam].text == text {
			continue
		}
		r, err := k.carry(fam, text)
		if err != nil {
			return repaired, err
		}
		repaired = repaired || r
	}
	if !unchanged {
		k.compared = k.now()
	}
	// That of before the comparison: whoever came after it, we ourselves too, has
	// it done again.
	k.mark = mark
	return repaired, nil
}

// carry makes the kernel carry the chains of one family, or none if text is
// empty.
func (k *xtKernel) carry(fam int, text string) (repaired bool, err error) {
	had := k.carried[fam]
	if had.text == "" && text == "" {
		return false, nil
	}
	saved, err := k.save(fam)
	if err != nil {
		return false, err
	}
	c := chainsOf(k.slot)
	if text == "" {
		k.carried[fam] = xtCarried{}
		return false, k.remove(fam, saved, func(chain string) bool { return !c.has(chain) })
	}
	if had.text == text {
		if c.image(saved) == had.image {
			return false, nil
		}
		repaired = true
	}
	if err := k.restore(fam, c.withJumps(text, saved)); err != nil {
		return false, fmt.Errorf("apply iptables rules: %w", err)
	}
	if saved, err = k.save(fam); err != nil {
		return repaired, err
	}
	k.carried[fam] = xtCarried{text: text, image: c.image(saved)}
	if !complete(text, k.carried[fam].image) {
		k.carried[fam].image = xtDisturbed
	}
	return repaired, nil
}

// xtDisturbed is the image if somebody was between our writing and our look: what
// the kernel shows next time will differ from it.
const xtDisturbed = "disturbed"

// complete tells whether an image has as many rules as were fed, and the jumps.
func complete(text, image string) bool {
	const jumps = 2 // see xtChains.jumps
	rules := func(s string) int { return strings.Count("\n"+s, "\n-A ") }
	return rules(image) == rules(text)+jumps
}

func (c xtChains) has(chain string) bool {
	return chain == c.query || chain == c.reply || chain == c.take
}

// image picks what is ours out of iptables-save's output.
func (c xtChains) image(saved string) string {
	var out strings.Builder
	for line := range strings.Lines(saved) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		ours := fields[0] == "-A" && c.has(fields[1]) || c.has(strings.TrimPrefix(fields[0], ":"))
		if jumps := c.jumps(); ours || slices.Contains(jumps[:], strings.TrimSpace(line)) {
			out.WriteString(line)
		}
	}
	return out.String()
}

// remove removes chains of ours that are not kept.
func (k *xtKernel) remove(fam int, saved string, keep func(chain string) bool) error {
	text := removal(saved, keep)
	if text == "" {
		return nil
	}
	if err := k.restore(fam, text); err != nil {
		return fmt.Errorf("remove iptables rules: %w", err)
	}
	return nil
}

// alive reads xt_recent's lists. They give the time in ticks of a length that
// we cannot know, so what counts is when we saw them move: an answer is taken
// to have left just after the look before, so that a service is never thought
// alive for longer than the kernel thinks so.
func (k *xtKernel) alive(services []Service) (map[Service]time.Duration, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make(map[Service]time.Duration)
	now := k.now()
	before := k.looked
	k.looked = now
	for _, s := range services {
		stamp, err := readRecent(recentName(k.slot, family(s.Addr.Addr()), s), s.Addr.Addr())
		if err != nil {
			return nil, err
		}
		last, known := k.seen[s]
		if stamp != last.stamp {
			last.stamp = stamp
			if known { // else it is from before our time
				last.moved = before
			}
			k.seen[s] = last
		}
		if left := k.timeout - now.Sub(last.moved); !last.moved.IsZero() && left > 0 {
			out[s] = left
		}
	}
	return out, nil
}

// forget forgets the answers of services that are not armed: their lists go
// with the rules that use them.
func (k *xtKernel) forget(armed []Service) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.seen, func(s Service, _ lastAnswer) bool { return !slices.Contains(armed, s) })
}

// readRecent returns the stamp of an address in a list of xt_recent, "" if it
// has none.
func readRecent(list string, addr netip.Addr) (string, error) {
	text, err := os.ReadFile("/proc/thread-self/net/xt_recent/" + list)
	if errors.Is(err, fs.ErrNotExist) { // a repair is due
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read answers' times: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		// src=10.96.0.10 ttl: 64 last_seen: 4294937521 oldest_pkt: 3 ...
		fields := strings.Fields(line)
		if len(fields) > 4 && fields[3] == "last_seen:" {
			if a, err := netip.ParseAddr(strings.TrimPrefix(fields[0], "src=")); err == nil && a == addr {
				return fields[4], nil
			}
		}
	}
	return "", nil
}

func (k *xtKernel) close() error {
	var errs []error
	c := chainsOf(k.slot)
	for fam := range 2 {
		if k.carried[fam].text == "" {
			continue
		}
		saved, err := k.save(fam)
		if err == nil {
			err = k.remove(fam, saved, func(chain string) bool { return !c.has(chain) })
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// probeSlot stands for no process: its chains exist only during a probe, and
// nothing jumps to them.
const probeSlot = -1

// probeXT finds out whether the programs are there and the kernel takes the
// rules, by giving it some that nothing leads to.
func probeXT(run program, rs RuleSet) support {
	if !hasNetAdmin() {
		return support{err: fmt.Errorf("no CAP_NET_ADMIN: %w", fs.ErrPermission)}
	}
	rs.slot = probeSlot
	k, err := newXTKernel(run, rs)
	if err != nil {
		return support{err: xtSupport(err)}
	}
	for fam := range 2 {
		if !rs.covers(fam) {
			continue
		}
		err := k.restore(fam, rs.restoreText(fam))
		if saved, e := k.save(fam); e == nil {
			c := chainsOf(probeSlot)
			err = errors.Join(err, k.remove(fam, saved, func(chain string) bool { return !c.has(chain) }))
		}
		if err != nil {
			return support{err: xtSupport(err)}
		}
	}
	variant := "nf_tables"
	if k.legacy {
		variant = "legacy"
	}
	return support{reason: "iptables-restore (" + variant + ") with xt_socket: pods only, no fallback for link-local addresses"}
}

// xtSupport tells a refusal for good from one that may pass.
func xtSupport(err error) error {
	var exit *exec.ExitError
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("%w: %w", ErrNotSupported, err)
	case errors.As(err, &exit) && exit.ExitCode() > 0 && exit.ExitCode() != lockTaken:
		return fmt.Errorf("%w: %w", ErrNotSupported, err)
	}
	return err
}

// hasNetAdmin reports whether the process may change networks at all.
func hasNetAdmin() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	err := unix.Capget(&header, &data[0])
	return err == nil && data[0].Effective&(1<<unix.CAP_NET_ADMIN) != 0
}
