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
		r   dnswire.Response
		in  = bufio.NewReaderSize(c.nc, 4096)
		len [2]byte
	)
	for {
		if _, err := io.ReadFull(in, len[:]); err != nil {
			return err
		}
		msg := make([]byte, binary.BigEndian.Uint16(len[:]))
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
		c.out = spare[:0]
		s.unlock()
		if len(out) == 0 {
			continue
		}
		_ = c.nc.SetWriteDeadline(time.Now().Add(s.f.config.Timeouts.Total)) // Write tells if the connection is closed
		if _, err := c.nc.Write(out); err != nil {
			c.close(err)
			return
		}
		spare = out
	}
}
