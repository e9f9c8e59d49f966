package main

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/engram-kv/engram/test/internal/cluster"
)

// TestMain is main for the scenario that has a process of its own made of this program.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == dropFlag {
		main()
		return
	}
	os.Exit(m.Run())
}

// tinySizes make every scenario run through in a moment.
var tinySizes = sizes{
	rounds: 1, keys: 2_000, valueBytes: 1024, someKeys: 12_000, revisions: 4_000,
	window: 100 * time.Millisecond, settle: 0, watchers: 20, leases: 200, storeBytes: 2 << 20,
}

// TestScenarios runs every scenario through at tiny sizes against Engram. Each figure must come out, and not below zero; what it is
// says nothing at this size. CI runs them beside etcd too (go run ./test/bench -short).
func TestScenarios(t *testing.T) {
	b := &bench{sizes: tinySizes, dir: t.TempDir(), progress: t.Output()}
	if err := b.build("", "", true); err != nil {
		t.Fatal(err)
	}
	r := newReport(true)
	for _, s := range scenarios {
		if s.measureCluster != nil && cluster.Chosen() != engramName { // Engram is left out
			continue
		}
		samples, err := b.run(s)
		if err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		for _, f := range s.figures {
			for system, taken := range samples {
				v, ok := taken[0][f.name]
				if !ok && f.name != pageCPU { // which at this size the puts may outweigh
					t.Errorf("%s of %s: no figure %q", s.name, system, f.name)
				}
				if v < 0 {
					t.Errorf("%s of %s: %q is %v", s.name, system, f.name, v)
				}
			}
		}
		r.add(s, samples, true)
	}
	var out bytes.Buffer
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", &out)
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

func TestReport(t *testing.T) {
	s := scenario{name: "s", figures: []figure{
		{name: "kept", unit: "us", target: 4},
		{name: "not kept", unit: "us", target: 4},
		{name: "for a full store", unit: "us", target: 4, sized: true},
		{name: "of ours alone", unit: "us"},
		{name: "often enough", unit: "/s", more: true, ratio: 5},
		{name: "too seldom", unit: "/s", more: true, ratio: 5},
		{name: "rate too low", unit: "/s", more: true, target: 10},
		{name: "by etcd's", unit: "us", ratio: 0.25},
	}}
	r := newReport(true)
	r.add(s, map[string][]sample{
		etcdName: {
			{"kept": 8, "not kept": 10, "often enough": 1, "too seldom": 1, "by etcd's": 4}, {"kept": 9, "not kept": 10}, {"kept": 1, "not kept": 10},
		},
		engramName: {
			{"often enough": 5, "too seldom": 4, "rate too low": 9, "by etcd's": 1},
			{"kept": 9, "not kept": 9, "for a full store": 9, "of ours alone": 1},
			{"kept": 4, "not kept": 5, "for a full store": 9, "of ours alone": 2},
			{"kept": 1, "not kept": 1, "for a full store": 9, "of ours alone": 3},
		},
	}, true)
	var out bytes.Buffer
	r.CPUs, r.GoVersion = 2, "go1"
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	const want = `
scenario  figure            unit  etcd (min median max)  engram (min median max)  engram/etcd  target         
s         kept              us    1 8 9                  1 4 9                    0.500        4              met
s         not kept          us    10.0 10.0 10.0         1 5 9                    0.500        4              MISSED
s         for a full store  us    -                      9 9 9                    -            4              
s         of ours alone     us    -                      1 2 3                    -            -              
s         often enough      /s    1 1 1                  5 5 5                    5.000        at least x5    met
s         too seldom        /s    1 1 1                  4 4 4                    4.000        at least x5    MISSED
s         rate too low      /s    -                      9 9 9                    -            at least 10.0  MISSED
s         by etcd's         us    4 4 4                  1 1 1                    0.250        x0.25          met
2 CPUs, go1, short: targets stated for a full store are not judged; 3 figures MISSED their target
`
	if got := "\n" + out.String(); got != want {
		t.Errorf("got:%s\nwant:%s", got, want)
	}
}

// BenchmarkApply is the apply scenario as a Go benchmark: CPU of the whole process per put.
func BenchmarkApply(b *testing.B) {
	a, err := openApplier(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	defer a.close()
	if err := a.apply(distinctKeys); err != nil {
		b.Fatal(err)
	}
	b.ResetTimer()
	spent, err := ownCPU(func() error {
		if err := a.apply(b.N); err != nil {
			return err
		}
		return a.store.Flush()
	})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(microsPer(spent, int64(b.N)), "cpu-us/put")
}
