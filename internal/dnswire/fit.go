package dnswire

// Fit cuts an answer to at most limit octets on the boundary of an RRset (RFC
// 2181 section 9: no partial RRset). msg is an accepted answer without an OPT
// record in which the records of an RRset follow each other, r its layout. It
// returns the length of what stays, the section counts of that, and whether
// something is missing that the client needs, so that TC must be set: the
// additional section never is; the authority section is where the client
// validates (do), where it is all that the answer has, and where it makes the
// answer a negative one (the SOA record at the end of a CNAME chain).
//
// The question always stays: a limit below 512 is not a limit of DNS.
func Fit(msg []byte, r *Response, limit int, do bool) (n int, an, ns, ar uint16, tc bool) {
	n = HeaderLen
	if r.NameLen > 0 {
		n += r.NameLen + 4
	}
	keep := len(r.Records)
	if keep > 0 && r.Records[keep-1].End > limit {
		keep = wholeRRsets(msg, r.Records, limit)
	}
	if keep > 0 {
		n = r.Records[keep-1].End
	}
	for i := range r.Records {
		kept := i < keep
		switch r.Records[i].Section {
		case Answer:
			an += count(kept)
			tc = tc || !kept
		case Authority:
			ns += count(kept)
			tc = tc || !kept && (do || an == 0 || r.Records[i].Type == TypeSOA)
		case Additional:
			ar += count(kept)
		}
	}
	return n, an, ns, ar, tc
}

// wholeRRsets returns how many records lie before limit, without those whose
// RRset goes on behind it.
func wholeRRsets(msg []byte, records []Record, limit int) int {
	n := 0
	for n < len(records) && records[n].End <= limit {
		n++
	}
	for n > 0 && n < len(records) && sameRRset(msg, &records[n-1], &records[n]) {
		n--
	}
	return n
}

func count(b bool) uint16 {
	if b {
		return 1
	}
	return 0
}

// sameRRset reports whether two neighbours belong to one RRset (RFC 2181
// section 5). RRSIG records of one owner count as one set: more than RFC 4034
// asks, never less.
func sameRRset(msg []byte, a, b *Record) bool {
	return a.Section == b.Section && a.Type == b.Type && a.Class == b.Class && NameEqual(msg, a.Off, b.Off)
}
