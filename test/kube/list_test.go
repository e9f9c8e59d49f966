package kube

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"github.com/engram-kv/engram/test/kube/member"
)

// eachRangeStream runs the test with lists of all Pods through RangeStream and through Range.
func eachRangeStream(t *testing.T, test func(t *testing.T, stream bool)) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprintf("EtcdRangeStream=%v", stream), func(t *testing.T) {
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.EtcdRangeStream, stream)
			test(t, stream)
		})
	}
}

// createMany stores n Pods with size bytes in an annotation, named pod-0000 on, and returns their names in order.
func createMany(t *testing.T, store storage.Interface, n, size int) []string {
	t.Helper()
	const writers = 8
	made := make([]string, n)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := w; i < n; i += writers {
				p := pod(fmt.Sprintf("pod-%04d", i))
				p.Annotations = map[string]string{"example.com/filling": strings.Repeat("x", size)}
				if err := store.Create(t.Context(), podKey(p.Name), p, nil, 0); err != nil {
					t.Errorf("create %s: %v", p.Name, err)
					return
				}
				made[i] = p.Name
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return made
}

func TestPagesAreOneRevisionWhileWritesGoOn(t *testing.T) {
	const pods, limit = 230, 50
	store := newStore(t, newConfig(startMember(t)))
	made := createMany(t, store, pods, 100)

	// The writer changes Pods that lie on all pages, until the test ends.
	wrote := make(chan struct{}, 1)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			name := made[i*37%pods]
			var err error
			switch i % 3 {
			case 0:
				_, err = bind(t.Context(), store, name, "node-"+strconv.Itoa(i))
			case 1:
				err = store.Delete(t.Context(), podKey(name), &corev1.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
			case 2:
				err = store.Create(t.Context(), podKey(name+"-new"), pod(name+"-new"), nil, 0)
			}
			if err != nil && !storage.IsNotFound(err) && !storage.IsExist(err) {
				t.Errorf("write %d, of %s: %v", i, name, err)
				return
			}
			select {
			case wrote <- struct{}{}:
			default:
			}
		}
	})
	defer wg.Wait()
	defer close(stop)

	<-wrote
	whole := list(t, store, nil)
	var got []string
	first, token, pages := "", "", 0
	for {
		page := list(t, store, func(o *storage.ListOptions) {
			o.Predicate.Limit, o.Predicate.Continue = limit, token
			if pages == 0 {
				o.ResourceVersion, o.ResourceVersionMatch = whole.ResourceVersion, metav1.ResourceVersionMatchExact
			}
		})
		pages++
		if first == "" {
			first = page.ResourceVersion
		}
		if page.ResourceVersion != first {
			t.Fatalf("page %d is of revision %s, page 1 of %s", pages, page.ResourceVersion, first)
		}
		for i, p := range page.Items {
			if want := whole.Items[len(got)+i]; p.Name != want.Name || p.ResourceVersion != want.ResourceVersion || p.Spec.NodeName != want.Spec.NodeName {
				t.Fatalf("page %d, item %d is %s of revision %s; want %s of %s", pages, i, p.Name, p.ResourceVersion, want.Name, want.ResourceVersion)
			}
		}
		got = append(got, names(page)...)
		token = page.Continue
		if token == "" {
			break
		}
		if left := page.RemainingItemCount; left == nil || int(*left) != len(whole.Items)-len(got) {
			t.Fatalf("page %d says that %v Pods remain; want %d", pages, left, len(whole.Items)-len(got))
		}
		<-wrote // at least one more write before the next page
	}
	if !slices.Equal(got, names(whole)) || pages != (len(whole.Items)+limit-1)/limit {
		t.Fatalf("%d Pods on %d pages; want the %d of one list at revision %s", len(got), pages, len(whole.Items), first)
	}
}

func TestListAtRevisions(t *testing.T) {
	eachRangeStream(t, func(t *testing.T, _ bool) {
		store := newStore(t, newConfig(startMember(t)))
		create(t, store, "a")
		two := create(t, store, "b")
		remove(t, store, "a")
		last := create(t, store, "c")

		at := func(version string, match metav1.ResourceVersionMatch) func(*storage.ListOptions) {
			return func(o *storage.ListOptions) { o.ResourceVersion, o.ResourceVersionMatch = version, match }
		}
		for _, c := range []struct {
			version string
			match   metav1.ResourceVersionMatch
			want    string
			wantAt  string
		}{
			{"", "", "b c", last.ResourceVersion},
			{"0", "", "b c", last.ResourceVersion},
			{two.ResourceVersion, metav1.ResourceVersionMatchExact, "a b", two.ResourceVersion},
			{two.ResourceVersion, metav1.ResourceVersionMatchNotOlderThan, "b c", last.ResourceVersion},
			{last.ResourceVersion, metav1.ResourceVersionMatchExact, "b c", last.ResourceVersion},
		} {
			got := list(t, store, at(c.version, c.match))
			if strings.Join(names(got), " ") != c.want || got.ResourceVersion != c.wantAt {
				t.Errorf("list at %q %s: %v at %s; want %s at %s", c.version, c.match, names(got), got.ResourceVersion, c.want, c.wantAt)
			}
		}

		future := strconv.FormatUint(revision(t, last.ResourceVersion)+1000, 10)
		for _, match := range []metav1.ResourceVersionMatch{metav1.ResourceVersionMatchExact, metav1.ResourceVersionMatchNotOlderThan} {
			opts := storage.ListOptions{Recursive: true, Predicate: everything(), ResourceVersion: future, ResourceVersionMatch: match}
			err := store.GetList(t.Context(), podsPrefix, opts, &corev1.PodList{})
			if match == metav1.ResourceVersionMatchNotOlderThan && !storage.IsTooLargeResourceVersion(err) {
				t.Errorf("list not older than the future: %v; want too large resource version", err)
			}
			if err == nil || apierrors.IsResourceExpired(err) {
				t.Errorf("list %s of the future: %v; want an error other than expired", match, err)
			}
		}
	})
}

func TestUnlimitedListAndStats(t *testing.T) {
	const pods, size = 1200, 3000 // together larger than one gRPC message of the default limit
	m := startMember(t, "--unsafe-no-fsync")
	made := createMany(t, newStore(t, newConfig(m)), pods, size)

	eachRangeStream(t, func(t *testing.T, stream bool) {
		store := newStore(t, newConfig(m))
		before := rangeStreams(t, m)
		got := list(t, store, nil)
		if !slices.Equal(names(got), made) {
			t.Fatalf("%d Pods; want the %d that were created, in order", len(got.Items), pods)
		}
		for _, p := range got.Items {
			if len(p.Annotations["example.com/filling"]) != size || p.ResourceVersion == "" {
				t.Fatalf("%s at revision %q with %d bytes of filling; want %d", p.Name, p.ResourceVersion, len(p.Annotations["example.com/filling"]), size)
			}
		}
		if used := rangeStreams(t, m) > before; used != stream {
			t.Fatalf("RangeStream used: %v; want %v", used, stream)
		}
		stats, err := store.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if stats.ObjectCount != pods {
			t.Fatalf("stats count %d objects; want %d", stats.ObjectCount, pods)
		}
	})
}

var rangeStreamsStarted = regexp.MustCompile(`(?m)^grpc_server_started_total\{[^}]*grpc_method="RangeStream"[^}]*\} (\d+)$`)

// rangeStreams returns how many RangeStream calls the member's metrics count.
func rangeStreams(t *testing.T, m *member.Member) int {
	t.Helper()
	resp, err := http.Get(m.ClientURL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	line := rangeStreamsStarted.FindSubmatch(text)
	if line == nil {
		t.Fatalf("%s/metrics has no grpc_server_started_total of RangeStream", m.ClientURL())
	}
	n, err := strconv.Atoi(string(line[1]))
	if err != nil {
		t.Fatal(err)
	}
	return n
}
