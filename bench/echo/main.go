// Command echo is what the kernel alone costs: a UDP server that sets the QR bit
// of whatever arrives and sends it back, in batches, on one thread. No DNS server
// can be cheaper on the same sockets, so bench/run measures it beside them.
//
// With -answer it is the stand-in for the rest of the world behind the forwarders
// under test: every A question has the address 192.0.2.1, every other type NODATA,
// at the same cost per packet.
//
//	echo -listen 10.99.0.1:53
//	echo -listen 10.99.0.2:53 -answer -ttl 3600
package main

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/dnsguard/dnsguard/bench/internal/socket"
	"github.com/dnsguard/dnsguard/internal/mmsg"
	"golang.org/x/sys/unix"
)

// batchLen is how many datagrams move per system call: as many as the servers
// beside it take, and the generator sends.
const batchLen = 64

func main() {
	listen := flag.String("listen", "127.0.0.1:5300", "`address:port` to serve")
	answer := flag.Bool("answer", false, "answer as a DNS server instead of echoing")
	ttl := flag.Uint("ttl", 3600, "TTL of answers, `seconds`")
	flag.Parse()

	addr, err := netip.ParseAddrPort(*listen)
	if err == nil {
		reply := echo
		if *answer {
			reply = answerer(uint32(*ttl))
		}
		err = serve(addr, reply)
	}
	fmt.Fprintln(os.Stderr, "echo:", err)
	os.Exit(1)
}

// serve answers each datagram with what reply leaves in its buffer. It returns only
// on error.
func serve(addr netip.AddrPort, reply func(buf []byte, n int) int) error {
	fd, err := socket.Listen(addr)
	if err != nil {
		return err
	}
	// One thread, nothing allocated: neither the collector nor the scheduler has
	// anything to do, and both stay out of the measurement.
	runtime.LockOSThread()
	debug.SetGCPercent(-1)

	in := mmsg.NewBatch(mmsg.Config{Len: batchLen, Size: 1232, Peers: true})
	out := make([]mmsg.Header, 0, batchLen)
	for {
		n, errno := in.Recv(uintptr(fd), unix.MSG_WAITFORONE)
		if errno != 0 {
			return fmt.Errorf("receive on %v: %w", addr, errno)
		}
		out = out[:0]
		for i := range n {
			msg, _ := in.Datagram(i)
			if size := reply(in.Buffer(i), len(msg)); size > 0 {
				out = append(out, in.Reply(i, size))
			}
		}
		// A client that went away is no reason to stop: skip what cannot be sent.
		for rest := out; len(rest) > 0; {
			sent, errno := mmsg.Send(uintptr(fd), rest, 0)
			if errno != 0 {
				sent = 1
			}
			rest = rest[sent:]
		}
	}
}

// echo turns the first n bytes of buf into a response.
func echo(buf []byte, n int) int {
	if n > 2 {
		buf[2] |= 0x80
	}
	return n
}
