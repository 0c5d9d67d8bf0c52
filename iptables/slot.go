package iptables

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// slots is how many processes could overlap, by far more than do. Order needs
// at least twice the number that does.
const slots = 8

// claimTries bounds the races between processes that start together.
const claimTries = 32

// slot is a process's place among those that overlap in an upgrade. It gives
// tables and chains their names. A newcomer takes the place after the newest,
// round and round, so that everybody can tell who is newer. The kernel frees
// it however the process ends: it is the name of a socket (abstract Unix, one
// name space a network namespace).
type slot struct {
	number int
	fd     int
	markFD int // of the name that tells our mark
}

func slotAddress(n int) unix.Sockaddr {
	return &unix.SockaddrUnix{Name: fmt.Sprintf("@dnsguard/intercept/%d", n)}
}

// markAddress is a second name of the process in a slot. It holds its mark, so
// that others can ask whether that is theirs.
func markAddress(n int, mark uint32) unix.Sockaddr {
	return &unix.SockaddrUnix{Name: fmt.Sprintf("@dnsguard/intercept/%d/%#x", n, mark)}
}

func nameSocket() (int, error) {
	return unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
}

// claimSlot takes the next free slot, for a process with this mark.
func claimSlot(mark uint32) (*slot, error) {
	fd, err := nameSocket()
	if err != nil {
		return nil, fmt.Errorf("claim a slot: %w", err)
	}
	for range claimTries {
		n, err := nextSlot(slotHeld)
		if err == nil {
			err = unix.Bind(fd, slotAddress(n))
			if errors.Is(err, unix.EADDRINUSE) {
				continue // somebody else was faster
			}
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("claim a slot: %w", err), unix.Close(fd))
		}
		s := &slot{number: n, fd: fd, markFD: -1}
		if s.markFD, err = nameSocket(); err == nil {
			err = unix.Bind(s.markFD, markAddress(n, mark))
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("claim a slot: %w", err), s.release())
		}
		return s, nil
	}
	return nil, errors.Join(errors.New("claim a slot: others were always faster"), unix.Close(fd))
}

// nextSlot returns the slot after the newest that is held, 0 if none is.
func nextSlot(held func(int) (bool, error)) (int, error) {
	newest, count := -1, 0
	for n := range slots {
		h, err := held(n)
		if err != nil {
			return 0, err
		}
		if !h {
			continue
		}
		count++
		newer, err := anyNewer(n, held)
		if err != nil {
			return 0, err
		}
		if !newer {
			newest = n
		}
	}
	switch {
	case count == 0:
		return 0, nil
	case newest < 0:
		return 0, fmt.Errorf("%d processes intercept already", count)
	}
	return (newest + 1) % slots, nil
}

// anyNewer reports whether a slot is held in the half circle after n.
func anyNewer(n int, held func(int) (bool, error)) (bool, error) {
	for i := 1; i < slots/2; i++ {
		if h, err := held((n + i) % slots); h || err != nil {
			return h, err
		}
	}
	return false, nil
}

// slotHeld asks the kernel whether a living process holds a slot.
func slotHeld(n int) (bool, error) { return nameHeld(slotAddress(n)) }

func nameHeld(name unix.Sockaddr) (bool, error) {
	fd, err := nameSocket()
	if err != nil {
		return false, fmt.Errorf("look for other processes: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	switch err := unix.Connect(fd, name); {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.ECONNREFUSED):
		return false, nil
	default:
		return false, fmt.Errorf("look for other processes: %w", err)
	}
}

// newest reports whether no newer process lives. In doubt it says so: what is
// shared is better kept twice than not at all.
func (s *slot) newest() bool {
	newer, err := anyNewer(s.number, slotHeld)
	return err != nil || !newer
}

// alone reports whether no other process lives. In doubt it does not.
func (s *slot) alone() bool {
	for n := range slots {
		if n == s.number {
			continue
		}
		if held, err := slotHeld(n); held || err != nil {
			return false
		}
	}
	return true
}

func (s *slot) release() error {
	err := unix.Close(s.fd)
	if s.markFD >= 0 {
		err = errors.Join(err, unix.Close(s.markFD))
	}
	return err
}

// OtherMark reports whether a living process intercepts with another mark
// (Config.Mark). It would not know our own queries to upstream from those of
// clients on the node, nor we its own: both would be taken, and led back to who
// asks. So a newcomer waits until it has gone.
func OtherMark(mark uint32) (bool, error) {
	c := Config{Mark: mark}.withDefaults()
	for n := range slots {
		held, err := slotHeld(n)
		if err != nil {
			return false, err
		}
		if !held {
			continue
		}
		if same, err := nameHeld(markAddress(n, c.Mark)); err != nil || !same {
			return err == nil, err
		}
	}
	return false, nil
}
