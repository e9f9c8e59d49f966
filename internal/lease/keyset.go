package lease

import (
	"iter"
	"slices"
)

// keySet is a set of key names. Most leases hold a few keys, for which a slice
// is smaller and faster than a map; Kubernetes' event leases hold thousands.
type keySet struct {
	few  []string
	many map[string]struct{} // nil while few serves
}

const fewKeys = 8

func (s *keySet) add(key []byte) {
	if s.many != nil {
		if _, ok := s.many[string(key)]; !ok {
			s.many[string(key)] = struct{}{}
		}
		return
	}
	if s.find(key) >= 0 {
		return
	}
	s.few = append(s.few, string(key))
	if len(s.few) <= fewKeys {
		return
	}
	s.many = make(map[string]struct{}, 2*fewKeys)
	for _, k := range s.few {
		s.many[k] = struct{}{}
	}
	s.few = nil
}

func (s *keySet) find(key []byte) int {
	return slices.IndexFunc(s.few, func(k string) bool { return k == string(key) })
}

// remove keeps the map even when few keys are left: a lease that held many is
// likely to do so again, and else ends soon.
func (s *keySet) remove(key []byte) {
	if s.many != nil {
		delete(s.many, string(key))
		return
	}
	if i := s.find(key); i >= 0 {
		last := len(s.few) - 1
		s.few[i] = s.few[last]
		s.few[last] = ""
		s.few = s.few[:last]
	}
}

func (s *keySet) len() int { return len(s.few) + len(s.many) }

// all iterates in no order over at most fewKeys keys or over a map, which may be
// changed between two steps.
func (s *keySet) all() iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, k := range s.few {
			if !yield(k) {
				return
			}
		}
		for k := range s.many {
			if !yield(k) {
				return
			}
		}
	}
}
