package config

import (
	"context"
	"crypto/sha256"
	"time"
)

// watchInterval is the time between two looks at a watched file. A change is
// told at the second look that finds it: after one to two intervals.
const watchInterval = time.Second

// Watch calls report with the content of the file at path: at once, and then
// whenever the content is another one than was reported last. A file that
// cannot be read is reported once, with the error, until it can be read again.
// Watch returns when ctx is done; report is never called after that, nor by
// another goroutine than Watch's.
//
// Since the first report is what is there at the start, no change is lost
// between a caller's own reading of the file and the watch. Who reloads
// compares [Config.Hash].
//
// The content is what counts, and it is polled. A ConfigMap's file is a link to
// a link that the kubelet replaces, two directories away; editors rename and
// create; a bind-mounted or network file changes without an event in this mount
// namespace. Following all of that with inotify means watching every directory
// on the way anew after each event; reading a few kilobytes a second finds them
// all, and what was merely touched is no change. A change counts when two looks
// in a row agree on it: a file that is being written in place is not reported
// half done.
func Watch(ctx context.Context, path string, report func(data []byte, err error)) {
	ticker := time.NewTicker(watchInterval)
	defer ticker.Stop()

	data, err := readFile(path)
	reported := digest(data, err)
	seen := reported
	if ctx.Err() == nil {
		report(data, err)
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		data, err := readFile(path)
		now := digest(data, err)
		settled := now == seen
		seen = now
		if settled && now != reported && ctx.Err() == nil {
			reported = now
			report(data, err)
		}
	}
}

// A fileDigest tells contents apart. All errors are one content: what matters
// is that there is nothing to read.
type fileDigest struct {
	unreadable bool
	sum        [sha256.Size]byte
}

func digest(data []byte, err error) fileDigest {
	if err != nil {
		return fileDigest{unreadable: true}
	}
	return fileDigest{sum: sha256.Sum256(data)}
}
