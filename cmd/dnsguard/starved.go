package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/iptables"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// reasonSockets is the reason of a withdrawal: no socket can be opened.
const reasonSockets = "no_sockets"

// starvedLooks is at how many looks in a row, interceptTick apart, no socket must
// be had and no upstream have answered before queries are left to kube-proxy.
const starvedLooks = 2

// starvation is want of descriptors or of memory for sockets: what is known is
// answered all the same, SERVFAIL is the answer to the rest. Those answers leave
// the sockets like any other, so the kernel takes us to be well; we know better.
type starvation struct {
	looks    int    // in a row
	answered uint64 // by upstreams, at the last look
	text     string // why, while queries are left to kube-proxy
}

// look takes what trying to open a socket gave, and how many questions upstreams
// have answered in all. It reports whether queries are to be left to kube-proxy.
func (s *starvation) look(err error, answered uint64) bool {
	heard := answered != s.answered
	s.answered = answered
	switch {
	case err == nil:
		s.looks, s.text = 0, ""
	case heard: // by sockets that are open
		s.looks = 0
	default:
		s.looks++
	}
	if s.looks >= starvedLooks {
		s.text = fmt.Sprintf("no socket can be opened to ask an upstream (%v): raise the limit of open files, or see who takes them; queries take kube-proxy's path", err)
	}
	return s.text != ""
}

// trySocket opens a socket and closes it. The error says that there is none to be
// had; what else may be wrong is not asked here.
func trySocket() error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		return unix.Close(fd)
	}
	if upstream.IsLocal(err) {
		return err
	}
	return nil
}

// feel leaves queries to kube-proxy while we can ask nobody, and takes them again
// once we can.
func (i *interception) feel() {
	if i.icp == nil {
		return
	}
	before := i.starved.text != ""
	now := i.starved.look(trySocket(), i.d.upstreamAnswers())
	i.d.conditions.notReady("sockets", i.starved.text)
	if now == before || i.held {
		return
	}
	var err error
	if now {
		err = i.icp.Withdraw(reasonSockets, iptables.All)
	} else {
		err = i.icp.Restore(iptables.All)
	}
	if err != nil {
		i.d.log.Warn("interception", "error", err) // it is repaired by Run
	}
}
