package watch

import "bytes"

// matcher finds the watchers of a key: those of one key in a map, those of a
// range in an interval tree. Watchers of equal keys and ranges form one group,
// which is matched once for all of them.
type matcher struct {
	cond  condition
	keys  map[string]*group
	tree  *group
	seed  uint64 // state of the generator of tree priorities
	count int    // watchers
	// all holds the groups, each at its own place.
	all []*group
}

// group is the watchers of one key or one range.
type group struct {
	span
	members  []*watcher // each at its own place
	wantPrev int        // members that want previous values
	place    int        // in matcher.all

	// hits are the matching entries of the round under way, as places in it.
	// They belong to the goroutine of the round, unlike all else.
	hits  []int32
	round uint64

	// The node of the interval tree: a treap ordered by span, in which every
	// node knows the highest end below it.
	left, right *group
	priority    uint64
	high        []byte // nil is beyond all keys
}

// span is the keys from key on and below end; a nil end is beyond all keys. If
// single, it is just key.
type span struct {
	key, end []byte
	single   bool
}

// newSpan normalizes a range as clients state it. ok is false if it is empty.
// The slices are kept.
func newSpan(key, end []byte) (s span, ok bool) {
	if len(key) == 0 {
		key = []byte{0}
	}
	switch {
	case len(end) == 0:
		return span{key: key, single: true}, true
	case len(end) == 1 && end[0] == 0:
		return span{key: key}, true
	}
	return span{key: key, end: end}, bytes.Compare(key, end) < 0
}

func (s span) compare(t span) int {
	if c := bytes.Compare(s.key, t.key); c != 0 {
		return c
	}
	return compareEnds(s.end, t.end)
}

// compareEnds compares upper ends, of which nil is the highest.
func compareEnds(a, b []byte) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return 1
	case b == nil:
		return -1
	}
	return bytes.Compare(a, b)
}

func newMatcher(c condition) *matcher {
	return &matcher{cond: c, keys: map[string]*group{}, seed: 1}
}

// add puts a watcher that is in no matcher into its group.
func (m *matcher) add(w *watcher) {
	g := m.group(w.span)
	w.cond, w.group, w.place = m.cond, g, len(g.members)
	g.members = append(g.members, w)
	if w.prevKV {
		g.wantPrev++
	}
	m.count++
}

// remove takes a watcher out of its group, and so out of a round under way. The
// last member of the group takes its place.
func (m *matcher) remove(w *watcher) {
	g := w.group
	last := len(g.members) - 1
	g.members[w.place] = g.members[last]
	g.members[w.place].place = w.place
	g.members[last] = nil
	g.members = g.members[:last]
	if w.prevKV {
		g.wantPrev--
	}
	w.cond, w.group, w.round = parked, nil, 0
	m.count--
	if len(g.members) == 0 {
		m.drop(g)
	}
}

// watchers returns all, in an order that depends on nothing but what was added
// and removed.
func (m *matcher) watchers() []*watcher {
	ws := make([]*watcher, 0, m.count)
	for _, g := range m.all {
		ws = append(ws, g.members...)
	}
	return ws
}

// each calls fn for every group that key is in.
func (m *matcher) each(key []byte, fn func(*group)) {
	if g := m.keys[string(key)]; g != nil {
		fn(g)
	}
	m.tree.stab(key, fn)
}

// group finds or makes the group of a span.
func (m *matcher) group(s span) *group {
	if s.single {
		if g := m.keys[string(s.key)]; g != nil {
			return g
		}
	} else {
		for n := m.tree; n != nil; {
			switch c := s.compare(n.span); {
			case c == 0:
				return n
			case c < 0:
				n = n.left
			default:
				n = n.right
			}
		}
	}
	g := &group{span: s, place: len(m.all), high: s.end, priority: m.random()}
	m.all = append(m.all, g)
	if s.single {
		m.keys[string(s.key)] = g
	} else {
		m.tree = m.tree.insert(g)
	}
	return g
}

// drop removes an empty group.
func (m *matcher) drop(g *group) {
	last := len(m.all) - 1
	m.all[g.place] = m.all[last]
	m.all[g.place].place = g.place
	m.all[last] = nil
	m.all = m.all[:last]
	if g.single {
		delete(m.keys, string(g.key))
	} else {
		m.tree = m.tree.delete(g.span)
	}
}

// random is splitmix64: priorities need no secrecy, but the same run must give
// the same tree.
func (m *matcher) random() uint64 {
	m.seed += 0x9e3779b97f4a7c15
	z := m.seed
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// stab calls fn for the ranges below g that hold key, lowest first.
func (g *group) stab(key []byte, fn func(*group)) {
	for g != nil && (g.high == nil || bytes.Compare(key, g.high) < 0) {
		g.left.stab(key, fn)
		if bytes.Compare(g.key, key) > 0 {
			return // so do all to the right
		}
		if g.end == nil || bytes.Compare(key, g.end) < 0 {
			fn(g)
		}
		g = g.right
	}
}

// insert returns the tree below g with n in it.
func (g *group) insert(n *group) *group {
	if g == nil {
		return n
	}
	if n.compare(g.span) < 0 {
		g.left = g.left.insert(n)
		if g.left.priority > g.priority {
			return g.rotateRight()
		}
	} else {
		g.right = g.right.insert(n)
		if g.right.priority > g.priority {
			return g.rotateLeft()
		}
	}
	g.update()
	return g
}

// delete returns the tree below g without the node of span s.
func (g *group) delete(s span) *group {
	switch c := s.compare(g.span); {
	case c < 0:
		g.left = g.left.delete(s)
	case c > 0:
		g.right = g.right.delete(s)
	default:
		joined := join(g.left, g.right)
		g.left, g.right = nil, nil
		return joined
	}
	g.update()
	return g
}

// join makes one tree of two, of which all of a comes before all of b.
func join(a, b *group) *group {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case a.priority > b.priority:
		a.right = join(a.right, b)
		a.update()
		return a
	}
	b.left = join(a, b.left)
	b.update()
	return b
}

func (g *group) rotateRight() *group {
	top := g.left
	g.left, top.right = top.right, g
	g.update()
	top.update()
	return top
}

func (g *group) rotateLeft() *group {
	top := g.right
	g.right, top.left = top.left, g
	g.update()
	top.update()
	return top
}

// update computes the highest end below g from its children's.
func (g *group) update() {
	g.high = g.end
	for _, c := range [...]*group{g.left, g.right} {
		if c != nil && compareEnds(c.high, g.high) > 0 {
			g.high = c.high
		}
	}
}
