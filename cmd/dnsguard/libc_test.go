package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
	"github.com/dnsguard/dnsguard/internal/lab/labtest"
)

// The ways to DNS for a pod: straight to the server, or through a dnsguard that
// leaves walks to clients, that finishes them, or that does so without knowing
// the pods.
const (
	alone = iota
	off
	on
	guessed
	numModes
)

var libcModes = [numModes]string{"alone", "off", "on", "guessed"}

// libcLab is a node with a dnsguard for each mode that has one. Each mode has a
// server of its own, and each client a pod of its own in each mode, so that all
// can work at once and be counted apart.
type libcLab struct {
	*node
	clients []libcClient
	server  [numModes]netip.Addr // what pods ask
	world   [numModes]*libcWorld
	pods    [numModes][]*lab.Pod // by client
}

func newLibcLab(t *testing.T) *libcLab {
	t.Helper()
	l := &libcLab{node: newNode(t), clients: libcClients(t)}
	var manifest strings.Builder
	for mode, name := range libcModes {
		for _, client := range l.clients {
			pod := labtest.AddPod(t, l.Lab, name+"-"+client.name)
			l.pods[mode] = append(l.pods[mode], pod)
			fmt.Fprintf(&manifest, `---
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: shop}
spec: {nodeName: node1, dnsPolicy: ClusterFirst, containers: [{name: c, image: i}]}
status: {phase: Running, podIP: %[2]q, podIPs: [{ip: %[2]q}]}
`, pod.Name, pod.IP4)
		}
	}
	pods := filepath.Join(l.dir, "pods.yaml")
	if err := os.WriteFile(pods, []byte(manifest.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	for mode, name := range libcModes {
		upstream := labtest.AddPod(t, l.Lab, "world-"+name)
		l.world[mode] = newLibcWorld(t, upstream, l.clients)
		if mode == alone {
			l.server[mode] = upstream.IP4
			continue
		}
		l.server[mode] = netip.AddrFrom4([4]byte{169, 254, 20, byte(10 + mode)})
		if err := l.Node.AddAddress(l.server[mode]); err != nil {
			t.Fatal(err)
		}
		kubernetes := fmt.Sprintf("kubernetes: {source: file, file: %s, nodeName: node1}", pods)
		if mode == guessed {
			kubernetes = "kubernetes: {source: none}"
		}
		d := l.start(name,
			fmt.Sprintf("listen: [%v]", l.server[mode]),
			"intercept: {mode: none}",
			"guard: {enabled: false}",
			kubernetes,
			fmt.Sprintf("upstreams: [{zones: [.], servers: ['%v']}]", upstream.IP4),
			fmt.Sprintf("search: {collapse: %v, domains: [node.example]}", mode >= on),
			// What is counted must not depend on how busy the machine is.
			"timeouts: {hedge: 2s, retry: 3s, stale: 4s, total: 4500ms}",
			"budget: {hedge: 0, retry: 0}",
			"cache: {prefetch: false, zones: {cluster.local: {negative: 1m}}}",
		)
		t.Cleanup(d.stop)
	}
	return l
}

// libcRow is what a client found for a case in one mode, and what it took: cold,
// and at once again.
type libcRow struct{ cold, warm libcMeasure }

type libcMeasure struct {
	found     string
	datagrams int                  // sent by the pod
	asked     map[lab.Question]int // of the world
	took      time.Duration
}

// questions returns how many questions the world was asked, and about how many
// names.
func (m *libcMeasure) questions() (questions, names int) {
	seen := map[string]bool{}
	for q, n := range m.asked {
		questions += n
		seen[q.Name] = true
	}
	return questions, len(seen)
}

// run has a client look up all cases.
func (l *libcLab) run(mode, client int) (rows []libcRow, err error) {
	c, pod := l.clients[client], l.pods[mode][client]
	resolvConf := fmt.Sprintf("nameserver %v\nsearch shop.svc.cluster.local svc.cluster.local cluster.local node.example\noptions ndots:5\n", l.server[mode])
	process, err := c.start(pod, l.dir, resolvConf)
	if err != nil {
		return nil, err
	}
	failing := false
	for _, lookup := range libcCases() {
		if len(lookup.fails) > 0 && !failing { // musl waits on SERVFAIL until its time is up
			failing = true
			if err := process.stop(); err != nil {
				return nil, err
			}
			if process, err = c.start(pod, l.dir, strings.Replace(resolvConf, "ndots:5", "ndots:5 timeout:1", 1)); err != nil {
				return nil, err
			}
		}
		var row libcRow
		if row.cold, err = l.measure(mode, pod, process, lookup); err != nil {
			return nil, err
		}
		if !failing {
			if row.warm, err = l.measure(mode, pod, process, lookup); err != nil {
				return nil, err
			}
		}
		rows = append(rows, row)
	}
	return rows, process.stop()
}

func (l *libcLab) measure(mode int, pod *lab.Pod, p *libcProcess, c libcCase) (m libcMeasure, err error) {
	before, err := datagramsSent(pod)
	if err != nil {
		return m, err
	}
	start := time.Now()
	if m.found, err = p.lookup(c.forClient(p.client.name).lookup); err != nil {
		return m, err
	}
	m.took = time.Since(start)
	after, err := datagramsSent(pod)
	m.datagrams = after - before
	m.asked = l.world[mode].count(c.mark(p.client.name))
	return m, err
}

// datagramsSent returns how many UDP datagrams have been sent in the pod.
func datagramsSent(pod *lab.Pod) (int, error) {
	var text []byte
	err := pod.Do(func() (err error) {
		text, err = os.ReadFile("/proc/thread-self/net/snmp")
		return err
	})
	if err != nil {
		return 0, err
	}
	var names []string
	for line := range strings.Lines(string(text)) {
		switch fields := strings.Fields(line); {
		case fields[0] != "Udp:":
		case names == nil:
			names = fields
		default:
			return strconv.Atoi(fields[slices.Index(names, "OutDatagrams")])
		}
	}
	return 0, fmt.Errorf("no UDP counters in %q", text)
}

// TestLibcs: real clients, with the resolv.conf that kubelet writes, find the
// same whether the node finishes their walks or not, and without it, at the
// cost that is promised. With -v it prints what each found and what it took.
//
// What it showed of the clients (glibc 2.36, musl 1.2.3, c-ares 1.18, Go 1.26,
// busybox 1.35) beyond their manuals:
//
//   - SERVFAIL is no better for musl than REFUSED: it asks again four times at
//     once, ignores what comes, and fails when its 5 s are over.
//   - musl judges A first: where A is NXDOMAIN it goes on to the next name,
//     although AAAA failed, but not the other way round.
//   - c-ares does not go on after SERVFAIL. Where one family fails and the
//     other is denied, it does what the answer that comes last says.
//   - glibc makes the whole search again when the addresses do not fit its
//     buffer: twice more for 60.
//   - musl 1.2.3 has no error of its own for NODATA: it is EAI_NONAME.
//   - busybox nslookup searches for names without a dot only, asks all domains
//     at once, and then not the name as it is.
func TestLibcs(t *testing.T) {
	l := newLibcLab(t)
	rows := make([][numModes][]libcRow, len(l.clients))
	var running sync.WaitGroup
	for i, client := range l.clients {
		for mode, name := range libcModes {
			running.Go(func() {
				var err error
				if rows[i][mode], err = l.run(mode, i); err != nil {
					t.Errorf("%s, %s: %v", client.name, name, err)
				}
			})
		}
	}
	running.Wait()
	if t.Failed() {
		return
	}
	t.Log(libcTable(l.clients, rows))
	for i, client := range l.clients {
		for j, c := range libcCases() {
			t.Run(client.name+": "+c.what, func(t *testing.T) {
				var r [numModes]libcRow
				for mode := range r {
					r[mode] = rows[i][mode][j]
				}
				judgeLibc(t, client.name, c, r)
			})
		}
	}
}

// judgeLibc checks what a client found in a case, and what it took.
func judgeLibc(t *testing.T, client string, c libcCase, r [numModes]libcRow) {
	want := r[alone].cold.found
	if client == "glibc" || client == "go" {
		if c.found != "" && want != c.found || c.found == "" && strings.ContainsAny(want, ".:") {
			t.Errorf("alone, it finds %q, not %q: the case is wrong", want, c.found)
		}
	}
	for mode, name := range libcModes {
		want := want
		switch {
		case mode >= on && c.settled && client != "busybox":
			want = c.found
		case c.settled && client == "c-ares":
			want = r[mode].cold.found // whichever answer came last
		}
		if got := r[mode].cold.found; got != want {
			t.Errorf("%s: finds %q, alone %q", name, got, want)
		}
		if got := r[mode].warm.found; got != want && len(c.fails) == 0 {
			t.Errorf("%s: finds %q when asked again, alone %q", name, got, want)
		}
	}
	if c.names == 0 || client == "busybox" {
		return
	}
	// Each name for A and AAAA; what nobody has is left to the client.
	search, finished := 2*c.names, 2
	if c.found == "" {
		finished = search
	}
	for mode, name := range libcModes {
		want := search
		if mode >= on {
			want = finished
		}
		if got := [2]int{r[mode].cold.datagrams, r[mode].warm.datagrams}; got != [2]int{want, want} {
			t.Errorf("%s: %d datagrams cold and warm, want %d", name, got, want)
		}
	}
	for mode := on; mode < numModes; mode++ {
		cold, warm := r[mode].cold, r[mode].warm
		// A walk waits for the other family's answer for a quarter of a second
		// before it asks for its own: on a busy machine, that can be too short.
		if questions, names := cold.questions(); names > c.names || questions > c.names+1 && cold.took < 250*time.Millisecond {
			t.Errorf("%s: %d questions upstream about %d names; want one a name, and one for the other family of the last of %d: %v", libcModes[mode], questions, names, c.names, cold.asked)
		}
		if n, _ := warm.questions(); n > 2 || n > 0 && !strings.Contains(c.what, "TTL 0") {
			t.Errorf("%s: %d questions upstream when warm: %v", libcModes[mode], n, warm.asked)
		}
	}
}

// libcTable shows everything.
func libcTable(clients []libcClient, rows [][numModes][]libcRow) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "\n\t\tdatagrams\tquestions upstream\t\t\n")
	fmt.Fprint(w, "name\tclient\talone/off/on\talone/off/on\tagain off/on\tfound\n")
	for j, c := range libcCases() {
		for i, client := range clients {
			a, f, o := rows[i][alone][j], rows[i][off][j], rows[i][on][j]
			found := a.cold.found
			if all := strings.Fields(found); len(all) > 2 && strings.HasPrefix(all[2], "192.0.2.") {
				found = fmt.Sprintf("%d addresses", len(all))
			}
			if o.cold.found != a.cold.found {
				found += "; on: " + o.cold.found
			}
			questions := func(m libcMeasure) int { n, _ := m.questions(); return n }
			fmt.Fprintf(w, "%s\t%s\t%d/%d/%d\t%d/%d/%d\t%d/%d\t%s\n", c.what, client.name,
				a.cold.datagrams, f.cold.datagrams, o.cold.datagrams,
				questions(a.cold), questions(f.cold), questions(o.cold), questions(f.warm), questions(o.warm), found)
		}
	}
	_ = w.Flush() // into memory
	return b.String()
}
