package ctguard

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/ti-mo/netfilter"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// countedEvents counts the datagrams that its subscriptions read: what the
// kernel's filter drops is none.
type countedEvents struct {
	*Kernel
	read, lost atomic.Int64
}

func (e *countedEvents) Subscribe(ports []uint16) (Subscription, error) {
	s, err := e.subscribe(ports, eventBuffer)
	if err != nil {
		return nil, err
	}
	s.transport = countedTransport{s.transport, e}
	return s, nil
}

type countedTransport struct {
	transport
	events *countedEvents
}

func (t countedTransport) receive(buf []byte) (int, error) {
	n, err := t.transport.receive(buf)
	switch {
	case err == nil:
		t.events.read.Add(1)
	case errors.Is(err, unix.ENOBUFS):
		t.events.lost.Add(1)
	}
	return n, err
}

// unrelated makes new flows that are nothing to the guard, of real packets: UDP
// over the loopback interface, each to another address. The kernel tracks them
// since there are rules, and drops them at a socket that nobody reads.
type unrelated struct {
	conn *ipv4.PacketConn
	msgs []ipv4.Message
	sent uint32
}

const unrelatedPort = 9999

// unrelatedSocket is the socket from which unrelated flows come.
func (n *namespace) unrelatedSocket() *net.UDPConn {
	n.t.Helper()
	n.rules(route{netip.MustParseAddrPort(vip4), netip.MustParseAddrPort(podA)})
	if err := n.listen(fmt.Sprintf("0.0.0.0:%d", unrelatedPort)).SetReadBuffer(1); err != nil {
		n.t.Fatal(err)
	}
	return n.listen("127.0.0.1:0")
}

func newUnrelated(c net.PacketConn) *unrelated {
	u := &unrelated{conn: ipv4.NewPacketConn(c), msgs: make([]ipv4.Message, 64)}
	for i := range u.msgs {
		u.msgs[i].Buffers = [][]byte{make([]byte, 32)}
		u.msgs[i].Addr = &net.UDPAddr{IP: make(net.IP, 4), Port: unrelatedPort}
	}
	return u
}

// make makes some flows, to the addresses 127.1.0.0 and following.
func (u *unrelated) make(flows int) error {
	for flows > 0 {
		batch := u.msgs[:min(flows, len(u.msgs))]
		for i := range batch {
			binary.BigEndian.PutUint32(batch[i].Addr.(*net.UDPAddr).IP, 127<<24+1<<16+u.sent+uint32(i))
		}
		sent, err := u.conn.WriteBatch(batch, 0)
		if err != nil {
			return err
		}
		u.sent += uint32(sent)
		flows -= sent
	}
	return nil
}

// pace makes so many flows, at a rate.
func (u *unrelated) pace(flows, rate int) error {
	for began, made := time.Now(), 0; made < flows; time.Sleep(500 * time.Microsecond) {
		due := min(int(time.Since(began).Seconds()*float64(rate)), flows) - made
		if err := u.make(due); err != nil {
			return err
		}
		made += due
	}
	return nil
}

// generatorFD is set in a process that is a generator.
const generatorFD = "CTGUARD_GENERATOR_FD"

// TestMain makes this program a generator of unrelated flows, if it was started as
// one: its CPU time is not to be mixed with the guard's.
func TestMain(m *testing.M) {
	if os.Getenv(generatorFD) == "" {
		os.Exit(m.Run())
	}
	if err := generate(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "generator:", err)
		os.Exit(1)
	}
}

// generate obeys orders, of a number of flows and a rate, 0 for as fast as can be.
// It tells the time that each took, and the CPU time, in nanoseconds.
func generate(orders io.Reader, reports io.Writer) error {
	runtime.LockOSThread()
	c, err := net.FilePacketConn(os.NewFile(3, "socket"))
	if err != nil {
		return err
	}
	u := newUnrelated(c)
	for {
		var flows, rate int
		if _, err := fmt.Fscanln(orders, &flows, &rate); err != nil {
			return nil // the other end has gone
		}
		before, began := cpuTime(unix.RUSAGE_THREAD), time.Now()
		if rate > 0 {
			err = u.pace(flows, rate)
		} else {
			err = u.make(flows)
		}
		if err != nil {
			return err
		}
		passed := time.Since(began)
		fmt.Fprintln(reports, passed.Nanoseconds(), (cpuTime(unix.RUSAGE_THREAD) - before).Nanoseconds())
	}
}

// generator is such a process.
type generator struct {
	b      *testing.B
	orders io.Writer
	answer *bufio.Reader
}

func startGenerator(b *testing.B, c *net.UDPConn) *generator {
	b.Helper()
	f, err := c.File()
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	cmd := exec.CommandContext(b.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), generatorFD+"=3")
	cmd.ExtraFiles = []*os.File{f}
	cmd.Stderr = os.Stderr
	orders, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	answers, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	// Now the socket is the generator's alone. Here, each packet that leaves would
	// wake this process (EPOLLOUT).
	if err := c.Close(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = orders.Close()
		_ = cmd.Wait()
	})
	return &generator{b: b, orders: orders, answer: bufio.NewReader(answers)}
}

// make orders flows, and tells the time that passed, the CPU time of the thread
// that made them, and that of this process meanwhile.
func (g *generator) make(flows, rate int) (passed, theirs, ours time.Duration) {
	g.b.Helper()
	before := cpuTime(unix.RUSAGE_SELF)
	if _, err := fmt.Fprintln(g.orders, flows, rate); err != nil {
		g.b.Fatal(err)
	}
	if _, err := fmt.Fscanln(g.answer, &passed, &theirs); err != nil {
		g.b.Fatal(err)
	}
	return passed, theirs, cpuTime(unix.RUSAGE_SELF) - before
}

// flush empties the namespace's table.
func (n *namespace) flush() {
	n.t.Helper()
	s, err := openSocket(n.fd)
	if err != nil {
		n.t.Fatal(err)
	}
	defer s.Close()
	req, err := request(ctDelete, netfilter.ProtoUnspec, netlink.Acknowledge, nil)
	if err == nil {
		err = s.send([]netlink.Message{req})
	}
	if err != nil {
		n.t.Fatal(err)
	}
	m, err := s.receive(make([]byte, answerSize))
	if err != nil || m == 0 {
		n.t.Fatal(err)
	}
}

// entries is how many the namespace's table has.
func (n *namespace) entries(k *Kernel) int {
	n.t.Helper()
	u, err := k.Usage()
	if err != nil {
		n.t.Fatal(err)
	}
	return int(u.Entries)
}

// TestKernelUnrelatedEvents: of new flows to other ports not one message reaches
// the process, while those to a watched port do.
func TestKernelUnrelatedEvents(t *testing.T) {
	n := newNamespace(t)
	u := newUnrelated(n.unrelatedSocket())
	e := &countedEvents{Kernel: n.kernel()}
	s, err := e.Subscribe([]uint16{53})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const flows = 20_000
	if err := u.make(flows); err != nil {
		t.Fatal(err)
	}
	if got := n.entries(e.Kernel); got < flows {
		t.Fatalf("%d entries of %d flows: the kernel does not track them", got, flows)
	}
	n.send("127.0.0.1:53")
	f, err := next(t, s)
	if err != nil || f.Orig.Dst != netip.MustParseAddrPort("127.0.0.1:53") {
		t.Fatalf("event %v, %v", f, err)
	}
	// Events come in the order of the flows: had one of the others passed, it
	// would have been read first.
	if read, lost := e.read.Load(), e.lost.Load(); read != 1 || lost != 0 {
		t.Errorf("%d messages read, %d times lost, with one flow to a watched port after %d others", read, lost, flows)
	}
}

// manyPorts are more than the filter compares, so that it lets every UDP flow
// pass: what a listener without one would have to read.
func manyPorts() []uint16 {
	ports := make([]uint16, maxFilterPorts+1)
	for i := range ports {
		ports[i] = uint16(1000 + i)
	}
	return ports
}

// BenchmarkEvents tells what the event listener costs when it has nothing to
// hear: new flows, 50,000 a second, none of them to a watched port.
//
//	go test ./ctguard -run '^$' -bench Events -benchtime 5x
//
// paced: guard-% is the user and system time of the guard's process, in percent of
// a core; idle-% the same when no flows are made; open-% when the kernel filters
// nothing. Another process makes the flows.
//
// flat out: the CPU time of a flow in the thread that makes it, which is where the
// kernel writes the message and drops it, and how many can be made in a second:
// without a listener, with the guard's, and with one that filters nothing, in turns.
func BenchmarkEvents(b *testing.B) {
	b.Run("paced", benchPaced)
	b.Run("flat out", benchFlatOut)
}

// listening has a guard that listens to events for the length of fn, and
// does not sweep in it: that is BenchmarkSweep's.
func listening(b *testing.B, n *namespace, snapshot *Snapshot, fn func()) *countedEvents {
	b.Helper()
	e := &countedEvents{Kernel: n.kernel()}
	g, err := New(Config{Table: e, Events: e, Host: e})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	r := &runner{Guard: g, followers: make(map[netip.AddrPort]*follower)}
	defer r.stop()
	defer cancel()
	g.Update(snapshot)
	r.sweep(ctx)
	if r.events == nil {
		b.Fatal("no subscription")
	}
	// What the runtime has to clear away of the rounds before is not to be done in
	// this one.
	debug.FreeOSMemory()
	fn()
	return e
}

// watching is a snapshot with frontends at all of the ports.
func watching(ports []uint16) *Snapshot {
	s := snapshotOf(up(podA), up(podB))
	s.Services[0].Ports = nil
	for _, p := range ports {
		s.Services[0].Ports = append(s.Services[0].Ports, Port{
			Name: fmt.Sprint(p), Port: p,
			Endpoints: []Endpoint{{Addr: netip.MustParseAddrPort(podA), Serving: true}},
		})
	}
	return s
}

func benchPaced(b *testing.B) {
	const (
		rate  = 50_000
		flows = 100_000 // in 2 s; nf_conntrack_max is 262,144
	)
	n := newNamespace(b)
	gen := startGenerator(b, n.unrelatedSocket())
	share := make(map[string][]float64)
	var perSecond float64
	lost := int64(0)
	for b.Loop() {
		for _, way := range []string{"idle", "guard", "open"} {
			ports := []uint16{53}
			if way == "open" {
				ports = manyPorts()
			}
			n.flush()
			e := listening(b, n, watching(ports), func() {
				passed, ours := flows*time.Second/rate, time.Duration(0)
				if way == "idle" {
					before := cpuTime(unix.RUSAGE_SELF)
					time.Sleep(passed)
					ours = cpuTime(unix.RUSAGE_SELF) - before
				} else {
					passed, _, ours = gen.make(flows, rate)
					perSecond = flows / passed.Seconds()
				}
				share[way] = append(share[way], 100*ours.Seconds()/passed.Seconds())
			})
			if got := e.read.Load(); way == "guard" && (got != 0 || e.lost.Load() != 0) {
				b.Fatalf("%d unrelated events reached the process", got)
			} else if way == "open" {
				lost += e.lost.Load()
			}
			if got := n.entries(e.Kernel); way != "idle" && got < flows {
				b.Fatalf("%d entries of %d flows", got, flows)
			}
		}
	}
	for way, all := range share {
		slices.Sort(all)
		b.ReportMetric(all[len(all)/2], way+"-%")
		b.ReportMetric(all[len(all)-1], way+"-%-max")
	}
	b.ReportMetric(perSecond, "flows/s")
	b.ReportMetric(float64(lost)/float64(b.N), "open-lost/op")
}

func benchFlatOut(b *testing.B) {
	const flows = 50_000
	n := newNamespace(b)
	gen := startGenerator(b, n.unrelatedSocket())
	each := make(map[string][]float64)
	speed := make(map[string][]float64)
	ways := []string{"none", "guard", "open"}
	for i := 0; b.Loop(); i++ {
		for j := range ways {
			way := ways[(i+j)%len(ways)] // nobody is always the first
			n.flush()
			round := func() {
				passed, theirs, _ := gen.make(flows, 0)
				each[way] = append(each[way], float64(theirs)/flows)
				speed[way] = append(speed[way], flows/passed.Seconds())
			}
			switch way {
			case "none":
				round()
			case "guard":
				listening(b, n, watching([]uint16{53}), round)
			case "open":
				listening(b, n, watching(manyPorts()), round)
			}
		}
	}
	for _, way := range ways {
		slices.Sort(each[way])
		slices.Sort(speed[way])
		b.ReportMetric(each[way][len(each[way])/2], way+"-ns/flow")
		b.ReportMetric(speed[way][len(speed[way])/2], way+"-flows/s")
	}
}
