package kube

import "time"

// Stats is how fresh a [Watcher]'s state is.
type Stats struct {
	// Synced tells whether everything has been read once.
	Synced bool

	// Age is the time since the source was last heard, for the watch that has
	// been silent longest: since the beginning if it never was. It does not
	// exceed about a minute while all is well.
	Age time.Duration

	// Watches are all watches.
	Watches []WatchStats
}

// WatchStats is how one watch is faring.
type WatchStats struct {
	Name   string // for people: the kind and what is watched of it, or the file
	Synced bool
	Age    time.Duration
	Err    error // why it does not get on at present, or nil
}

func (f *feeds) stats() Stats {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := Stats{Synced: true}
	for _, w := range f.watches {
		age := time.Since(w.heard)
		s.Synced = s.Synced && w.synced
		s.Age = max(s.Age, age)
		s.Watches = append(s.Watches, WatchStats{Name: w.name, Synced: w.synced, Age: age, Err: w.err})
	}
	return s
}
