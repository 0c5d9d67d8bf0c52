package upstream

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/internal/mmsg"
)

const (
	// batchLen answers are taken from a socket by one system call. It bounds
	// how long the call keeps its P (RawSyscall).
	batchLen = 16
	// datagramLen is the longest answer taken over UDP. We offer udpSize;
	// what is longer counts as cut.
	datagramLen = 2048
	// udpSize is the EDNS size that we offer (RFC 9715: no fragments).
	udpSize = 1232
	// receiveBuffer, per UDP socket: the default of 208 KiB holds some 250
	// small answers, fewer than a burst of questions can have at a time.
	receiveBuffer = 1 << 20
	// streamBuffer, per TCP connection: by itself the kernel keeps up to 6 MiB
	// for each (net.ipv4.tcp_rmem), where answers come faster than they are
	// read, and it counts against the memory limit of the process.
	streamBuffer = 128 << 10
)

// dialer makes the sockets of production.
type dialer struct{ net.Dialer }

func (d *dialer) dial(ctx context.Context, network string, server netip.AddrPort) (net.Conn, error) {
	if network == "tcp" {
		c, err := d.DialTCP(ctx, network, netip.AddrPort{}, server)
		if err != nil {
			return nil, err
		}
		_ = c.SetReadBuffer(streamBuffer) // else the kernel keeps more
		return c, nil
	}
	c, err := d.DialUDP(ctx, network, netip.AddrPort{}, server)
	if err != nil {
		return nil, err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	err = raw.Control(func(fd uintptr) {
		// Beyond net.core.rmem_max only with CAP_NET_ADMIN. Without a large
		// buffer a burst costs answers, which are then asked for again.
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
		}
	})
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// batch is what one call of recvmmsg(2) fills. The call is a raw one, since it
// never blocks: syscall.Syscall would give the P away and wake sysmon, which at low
// rates costs more than all else (23 against 47 us of CPU for an echoed datagram).
type batch struct {
	*mmsg.Batch
	response dnswire.Response
}

func newBatch() *batch {
	return &batch{Batch: mmsg.NewBatch(mmsg.Config{Len: batchLen, Size: datagramLen})}
}

// readBatches reads a socket of the kernel until it fails or is done. All
// within one RawConn.Read: its callback returns false to wait, and a datagram
// that comes between recvmmsg and the wait ends the wait at once, so that no
// call is wasted on finding the queue empty.
func (c *conn) readBatches() error {
	f := c.srv.f
	b := f.batches.Get().(*batch)
	defer f.batches.Put(b)
	var failure error
	blank := 0
	err := c.raw.Read(func(fd uintptr) bool {
		for {
			n, errno := b.Recv(fd, unix.MSG_DONTWAIT)
			if errno == unix.EAGAIN || errno == unix.ENOMEM || errno == unix.ENOBUFS {
				blank = 0
				return false
			}
			if errno != 0 {
				var more bool
				if more, failure = c.readFailed(fd, errno, &blank); !more {
					return true
				}
				continue
			}
			blank = 0
			now := f.now()
			for i := range n {
				msg, cut := b.Datagram(i)
				if cut && len(msg) >= dnswire.HeaderLen {
					dnswire.SetFlags(msg, dnswire.Flags(msg)|dnswire.FlagTC)
				}
				if !c.receive(msg, &b.response, now, false) {
					return true
				}
			}
			if n < batchLen {
				return false
			}
		}
	})
	if failure != nil {
		return failure
	}
	return err
}

// readFailed acts on an error of a read. It reports whether the socket has more to
// wait for; dead is why it is of no more use. blank counts the errors in a row that
// came without an ICMP error: one such is what a sender leaves that has taken the ICMP
// error, more are what a security module gives to every read.
func (c *conn) readFailed(fd uintptr, errno error, blank *int) (more bool, dead error) {
	if !fromICMP(errno) {
		return false, errno
	}
	if !c.quotes {
		if *blank++; *blank <= maxBlank && c.survives() {
			return true, nil
		}
		return false, errno
	}
	all := readBounces(fd)
	if len(all) > 0 {
		*blank = 0
	} else if *blank++; *blank > maxBlank {
		return false, errno
	}
	for i := range all {
		if more, dead := c.bounced(&all[i]); !more {
			return false, dead
		}
	}
	return true, nil
}

// readDatagrams reads a socket that is not of the kernel.
func (c *conn) readDatagrams() error {
	var r dnswire.Response
	buf := make([]byte, datagramLen)
	for {
		n, err := c.nc.Read(buf)
		var b *bounce
		switch {
		case err == nil:
		case errors.As(err, &b):
			if more, dead := c.bounced(b); !more {
				return dead
			}
			continue
		case errors.Is(err, unix.ECONNREFUSED) && c.survives():
			continue
		default:
			return err
		}
		if !c.receive(buf[:n], &r, c.srv.f.now(), false) {
			return nil
		}
	}
}

// send sends the exchange's message msg with the id, now, or not at all: what the
// kernel does not send is lost like any other datagram, and asked again like any
// other, out of the budget.
//
// Two questions on one new socket never race each other into the connection
// tracker (which drops one of them, the five-second lookups of Kubernetes): one
// write at a time holds the descriptor's lock, and the first packet is tracked
// before its write returns.
func (c *conn) send(x *exchange, id uint16, msg []byte) {
	var err error
	for range maxSends {
		if c.raw != nil {
			x.out = msg
			err = c.raw.Write(x.sendTo)
			if err == nil && x.errno != 0 {
				err = x.errno
			}
		} else {
			_, err = c.nc.Write(msg)
		}
		if err == nil || !c.aboutOthers(err) {
			break
		}
	}
	if err != nil {
		c.unsent(id, err)
	}
}

// unsent notes that the question with the id was not sent. It reports whether
// the socket can be used all the same.
func (c *conn) unsent(id uint16, err error) bool {
	if isDead(err) && !(errors.Is(err, unix.ECONNREFUSED) && (c.quotes || c.survives())) {
		c.close(err)
		return false
	}
	s := c.srv
	s.mu.Lock()
	defer s.unlock()
	s.paths[c.tr].failures[Local]++
	if e := c.entries[id]; e.x != nil {
		e.x.at(int(e.i)).unsent = err
	}
	return true
}

// rawSend is the callback of RawConn.Write.
func (x *exchange) rawSend(fd uintptr) bool {
	_, _, x.errno = unix.RawSyscall6(unix.SYS_SENDTO, fd, uintptr(unsafe.Pointer(&x.out[0])), uintptr(len(x.out)),
		unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	runtime.KeepAlive(x)
	return true
}
