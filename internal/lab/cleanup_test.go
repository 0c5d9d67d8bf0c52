package lab_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// reclaimTimeout bounds the kernel's own work of taking namespaces apart; it
// does so one after the other, some ten milliseconds each.
const reclaimTimeout = 30 * time.Second

// witness tells when the kernel has removed namespaces: each is connected to
// the witness's own by a veth, which goes when either end goes.
type witness struct {
	links   map[string]bool // still there
	removed chan netlink.LinkUpdate
}

// newWitness connects to namespaces given as open files, which it closes.
func newWitness(t *testing.T, namespaces []*os.File) *witness {
	t.Helper()
	n := labtest.NewNamespace(t, "witness")
	w := &witness{links: make(map[string]bool), removed: make(chan netlink.LinkUpdate)}
	done := make(chan struct{})
	t.Cleanup(func() {
		close(done)
		for range w.removed { // until the subscription has ended
		}
	})
	err := n.Do(func() error {
		for i, file := range namespaces {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "w" + strconv.Itoa(i)
			link := &netlink.Veth{LinkAttrs: attrs, PeerName: "witness", PeerNamespace: netlink.NsFd(file.Fd())}
			if err := netlink.LinkAdd(link); err != nil {
				return err
			}
			if err := file.Close(); err != nil {
				return err
			}
			w.links[attrs.Name] = true
		}
		return netlink.LinkSubscribe(w.removed, done)
	})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// await waits until every namespace has gone.
func (w *witness) await(t *testing.T) {
	t.Helper()
	timeout := time.After(reclaimTimeout)
	for len(w.links) > 0 {
		select {
		case u := <-w.removed:
			if u.Header.Type == unix.RTM_DELLINK {
				delete(w.links, u.Attrs().Name)
			}
		case <-timeout:
			t.Fatalf("%d namespaces are still there", len(w.links))
		}
	}
}

// openNamespace returns a file of the namespace.
func openNamespace(t *testing.T, n *lab.Namespace) *os.File {
	t.Helper()
	var f *os.File
	if err := n.Do(func() (err error) { f, err = os.Open("/proc/thread-self/ns/net"); return err }); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestCloseLeavesNothing(t *testing.T) {
	labtest.CheckLeaks(t)
	labtest.Require(t)
	l, err := lab.New()
	if err != nil {
		t.Fatal(err)
	}
	client := labtest.AddPod(t, l, "client")
	dns := labtest.AddDNS(t, l, "dns-a", "dns-b")
	if err := dns[1].Server.SetFaults(lab.Faults{BlockTCP: true}); err != nil {
		t.Fatal(err)
	}
	mustStartRole(t, l.Node.Namespace, "wait", map[string][]byte{"x": nil})
	for range 10 {
		mustAsk(t, client.Namespace, "udp", l.DNS.Addr(true), "echo.default.svc.cluster.local")
	}
	var files []*os.File
	for _, n := range []*lab.Namespace{l.Node.Namespace, l.Gateway, client.Namespace, dns[0].Namespace, dns[1].Namespace} {
		files = append(files, openNamespace(t, n))
	}
	w := newWitness(t, files)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	w.await(t)
}

// A laboratory in another process, with a child there, is killed as hard as it
// goes: the kernel must take everything back.
func TestKillLeavesNothing(t *testing.T) {
	labtest.CheckLeaks(t)
	outer := labtest.NewNamespace(t, "outer")
	p, r := mustStartRole(t, outer, "lab", nil)

	held, err := filepath.Glob("/proc/" + strconv.Itoa(p.Pid()) + "/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	var files []*os.File
	for _, fd := range held {
		if target, err := os.Readlink(fd); err != nil || !strings.HasPrefix(target, "net:[") {
			continue
		}
		f, err := os.Open(fd)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	if len(files) != 3 {
		t.Fatalf("the laboratory holds %d namespaces, want node, gateway and one pod", len(files))
	}
	w := newWitness(t, files)
	child, err := unix.PidfdOpen(r.Child, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(child) }()

	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	ended := []unix.PollFd{{Fd: int32(child), Events: unix.POLLIN}}
	if n, err := unix.Poll(ended, int(reclaimTimeout.Milliseconds())); n != 1 {
		t.Errorf("the laboratory's child %d lives on (%v)", r.Child, err)
	}
	w.await(t)
	if _, err := os.Stat("/run/held-by-lab"); !os.IsNotExist(err) {
		t.Errorf("its file is in the machine's /run: %v", err)
	}
}
