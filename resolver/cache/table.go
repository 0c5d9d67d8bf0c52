package cache

// node is one entry's place in a table and in a segment's order of use. Its 48
// octets are a size class of the allocator.
type node struct {
	next, prev *node // in the segment: towards older and newer
	chain      *node // in the table's bucket
	blob       string
	tag        uint32 // low bits of the key's hash
	slack      uint16 // what the allocator gives the blob beyond its length
	segment    segment
	use        use
}

// use records how a node was used.
type use uint8

const (
	usedHit   use = 1 << iota // hit since its blob was stored
	usedOnce                  // asked for again since it came
	usedTwice                 // and again
)

// nodeBytes is what a node takes from the heap.
const nodeBytes = 48

// bytes returns what the node and its blob take from the heap.
func (n *node) bytes() int64 { return nodeBytes + int64(len(n.blob)) + int64(n.slack) }

// setBlob gives the node a blob for which the allocator gave size octets.
func (n *node) setBlob(blob string, size int) {
	n.blob, n.slack = blob, uint16(size-len(blob)) //nolint:gosec // less than a page
}

// table is a hash table of nodes, chained. It grows and shrinks by powers of
// two, which unlike a map it does predictably: all of its memory is accounted.
type table struct {
	buckets []*node
	n       int
}

const (
	minBuckets = 8
	// bucketBytes is 8 and an eighth: the allocator's header moves the
	// array into the next size class.
	bucketBytes = 9
)

// find returns the node with the key, or nil.
func (t *table) find(tag uint32, key []byte) *node {
	if t.n == 0 {
		return nil
	}
	for n := t.buckets[int(tag)&(len(t.buckets)-1)]; n != nil; n = n.chain {
		if n.tag == tag && (Entry{blob: n.blob}).key() == string(key) {
			return n
		}
	}
	return nil
}

// insert adds a node whose key is not in the table. It returns by how many
// octets the table grew.
func (t *table) insert(n *node) int64 {
	grown := int64(0)
	if t.n == len(t.buckets) {
		grown = t.resize(max(minBuckets, 2*len(t.buckets)))
	}
	t.n++
	t.link(n)
	return grown
}

// remove takes out a node that is in the table. It returns by how many octets
// the table grew, which is less than zero if it shrank.
func (t *table) remove(n *node) int64 {
	p := &t.buckets[int(n.tag)&(len(t.buckets)-1)]
	for *p != n {
		p = &(*p).chain
	}
	*p, n.chain = n.chain, nil
	t.n--
	if len(t.buckets) > minBuckets && t.n < len(t.buckets)/4 {
		return t.resize(len(t.buckets) / 2)
	}
	return 0
}

func (t *table) link(n *node) {
	p := &t.buckets[int(n.tag)&(len(t.buckets)-1)]
	n.chain, *p = *p, n
}

func (t *table) resize(size int) (grown int64) {
	old := t.buckets
	t.buckets = make([]*node, size)
	for _, n := range old {
		for n != nil {
			next := n.chain
			t.link(n)
			n = next
		}
	}
	return bucketBytes * int64(size-len(old))
}

// list is a segment's part of one shard, in order of use. The zero list is
// empty.
type list struct {
	newest, oldest *node
	n              int
}

func (l *list) push(n *node) {
	n.prev, n.next = nil, l.newest
	if l.newest != nil {
		l.newest.prev = n
	} else {
		l.oldest = n
	}
	l.newest = n
	l.n++
}

func (l *list) remove(n *node) {
	if n.prev != nil {
		n.prev.next = n.next
	} else {
		l.newest = n.next
	}
	if n.next != nil {
		n.next.prev = n.prev
	} else {
		l.oldest = n.prev
	}
	n.prev, n.next = nil, nil
	l.n--
}
