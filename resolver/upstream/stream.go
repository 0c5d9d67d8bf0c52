package upstream

import (
	"bufio"
	"encoding/binary"
	"io"
	"time"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// readStream reads answers, each after its length (RFC 1035 section 4.2.2),
// until the connection fails or is done.
func (c *conn) readStream() error {
	var (
		r      dnswire.Response
		in     = bufio.NewReaderSize(c.nc, 4096)
		length [2]byte
	)
	for {
		if _, err := io.ReadFull(in, length[:]); err != nil {
			return err
		}
		msg := make([]byte, binary.BigEndian.Uint16(length[:]))
		if _, err := io.ReadFull(in, msg); err != nil {
			return err
		}
		if !c.receive(msg, &r, c.srv.f.now(), true) {
			return nil
		}
	}
}

// writeStream writes what enqueue leaves, as much at a time as there is.
func (c *conn) writeStream() {
	s := c.srv
	defer s.f.running.Done()
	var spare []byte
	for range c.kick {
		s.mu.Lock()
		out := c.out
		c.out, spare = spare[:0], nil // never both at once
		s.unlock()
		if len(out) > 0 && !c.write(out) {
			return
		}
		spare = out
	}
}

// write writes to the connection, which it closes if that fails.
func (c *conn) write(b []byte) bool {
	err := c.nc.SetWriteDeadline(time.Now().Add(c.srv.f.config.Timeouts.Total))
	if err == nil {
		_, err = c.nc.Write(b)
	}
	if err != nil {
		c.close(err)
	}
	return err == nil
}
