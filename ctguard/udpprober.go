package ctguard

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// UDPProber probes DNS servers with a query over UDP. Anything that comes
// back under the query's id is an answer: a server that refuses the question
// is alive. It implements [Prober].
type UDPProber struct {
	query []byte // with id 0
}

// NewUDPProber makes a prober that asks for the SOA record of name, which
// should be a zone that the servers answer from memory: the cluster's domain.
// Recursion is not desired, so that nobody is asked further.
func NewUDPProber(name string) (*UDPProber, error) {
	// RFC 1035, 4.1.1: no flags, one question.
	q := []byte{0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0}
	if name = strings.TrimSuffix(name, "."); name != "" {
		for label := range strings.SplitSeq(name, ".") {
			if label == "" || len(label) > 63 {
				return nil, fmt.Errorf("probe name %q: label of %d bytes", name, len(label))
			}
			q = append(q, byte(len(label)))
			q = append(q, label...)
		}
	}
	if len(q) > 12+254 {
		return nil, fmt.Errorf("probe name %q: longer than 255 bytes", name)
	}
	const typeSOA, classIN = 6, 1
	return &UDPProber{append(q, 0, 0, typeSOA, 0, classIN)}, nil
}

// Probe implements [Prober]. An ICMP error from the endpoint's host ends it
// early.
func (p *UDPProber) Probe(ctx context.Context, endpoint netip.AddrPort) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "udp", endpoint.String())
	if err != nil {
		return fmt.Errorf("probe %v: %w", endpoint, unsent(err))
	}
	defer func() { _ = conn.Close() }()
	// The past: whatever waits returns at once.
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()

	id := uint16(rand.Uint32())
	query := append([]byte(nil), p.query...)
	binary.BigEndian.PutUint16(query, id)
	if _, err := conn.Write(query); err != nil {
		return fmt.Errorf("probe %v: %w", endpoint, unsent(err))
	}
	if err := awaitAnswer(conn, id); err != nil {
		return fmt.Errorf("probe %v: %w", endpoint, err)
	}
	return nil
}

// unsent is err as [ErrNotSent], unless it says something of the endpoint.
func unsent(err error) error {
	for _, theirs := range []error{unix.ECONNREFUSED, unix.EHOSTUNREACH, unix.ENETUNREACH} {
		if errors.Is(err, theirs) {
			return err
		}
	}
	return fmt.Errorf("%w: %w", ErrNotSent, err)
}

// awaitAnswer reads until there is an answer or the connection's deadline is
// over. What has come by then counts, also if this process was held up.
func awaitAnswer(conn net.Conn, id uint16) error {
	var buf [512]byte
	for last := false; ; {
		n, err := conn.Read(buf[:])
		if errors.Is(err, os.ErrDeadlineExceeded) && !last {
			// Past its deadline, a connection does not look.
			last = true
			if err := conn.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		const header, response = 12, 0x80
		if n >= header && binary.BigEndian.Uint16(buf[:]) == id && buf[2]&response != 0 {
			return nil
		}
	}
}
