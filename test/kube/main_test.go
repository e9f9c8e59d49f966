// Package kube runs Kubernetes' storage layer on Engram: the etcd3 store, the watch cache, the compactor and the lease
// manager of k8s.io/apiserver, as an API server puts them together, with core/v1 Pods in protobuf, beside one Engram process
// per test.
//
// It holds tests only. The environment variable KUBE_ENGRAM names the program to test; unset: engram, built from the
// parent module. With the path of an etcd, a test that fails shows a fault of its own. What Kubernetes itself tests is not written again here: upstream_test.go runs those tests as they
// are. The tests of this package add what a whole API server does over time: many Pods, writers beside readers,
// compaction by the clock, and the member going away and coming back.
package kube

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"

	"github.com/engram-kv/engram/test/kube/member"
)

const (
	parentModule = "../.."
	storePrefix  = "/registry"
	podsPrefix   = "/pods/"

	// eventWithin is how long a test waits for what must come.
	eventWithin = 60 * time.Second

	// brokenGuarantee begins what test/again never excuses; test/internal/broken, of another module, has the same.
	brokenGuarantee = "BROKEN GUARANTEE: "
)

// program is the path of engram, set by TestMain.
var program string

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	if program = os.Getenv(embed.ProgramVariable); program != "" {
		return m.Run(), nil
	}
	// The program stays here from run to run: go build leaves one that is up to date alone.
	dir, err := os.UserCacheDir()
	if err != nil {
		return 0, err
	}
	dir = filepath.Join(dir, "engram-kube")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return 0, err
	}
	if program, err = member.Build(parentModule, dir); err != nil {
		return 0, err
	}
	if member.Race() {
		return raced(m.Run)
	}
	return m.Run(), nil
}

// raced runs tests and fails them for each report of the race detector, which processes inherit the place of.
func raced(run func() int) (code int, err error) {
	dir, err := os.MkdirTemp("", "engram-race-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.Setenv("GORACE", "log_path="+filepath.Join(dir, "report")); err != nil {
		return 0, err
	}
	code = run()
	files, err := os.ReadDir(dir)
	if err != nil {
		return code, err
	}
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			return code, err
		}
		fmt.Fprintf(os.Stderr, "%s under the race detector:\n%s", f.Name(), text)
		code = 1
	}
	return code, nil
}

func startMember(t *testing.T, flags ...string) *member.Member {
	t.Helper()
	m, err := member.Start(member.Options{Program: program, Dir: filepath.Join(t.TempDir(), "data"), Flags: flags})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Stop(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("end of the member's log:\n%s", m.Log())
		}
	})
	return m
}

// newConfig returns what an API server hands to its storage for Pods: the defaults, without compaction by the clock.
func newConfig(m *member.Member) *storagebackend.ConfigForResource {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	if err := corev1.AddToScheme(scheme); err != nil {
		panic(err) // wrong program, not wrong input
	}
	pb := protobuf.NewSerializer(scheme, scheme)
	versions := schema.GroupVersions{corev1.SchemeGroupVersion}
	codec := serializer.NewCodecFactory(scheme).CodecForVersions(pb, pb, versions, versions)

	config := storagebackend.NewDefaultConfig(storePrefix, codec)
	config.Transport.ServerList = []string{m.ClientURL()}
	config.CompactionInterval = 0
	return config.ForResource(schema.GroupResource{Resource: "pods"})
}

// newStore connects the plain store to the member.
func newStore(t *testing.T, config *storagebackend.ConfigForResource) storage.Interface {
	t.Helper()
	store, destroy, err := factory.Create(*config, newPod, newPodList, podsPrefix)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(destroy)
	return store
}

// newCachedStore connects a store with the watch cache in front, and waits until the cache is filled.
func newCachedStore(t *testing.T, config *storagebackend.ConfigForResource) storage.Interface {
	t.Helper()
	store, destroy, err := genericregistry.StorageWithCacher()(config, podsPrefix, keyOf, newPod, newPodList, podAttrs,
		storage.IndexerFuncs{}, &cache.Indexers{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(destroy)
	waitFor(t, "watch cache to be filled", func() error { return store.ReadinessCheck() })
	return store
}

func newPod() runtime.Object     { return &corev1.Pod{} }
func newPodList() runtime.Object { return &corev1.PodList{} }

func keyOf(obj runtime.Object) (string, error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return "", fmt.Errorf("%T: not a Pod", obj)
	}
	return podsPrefix + pod.Namespace + "/" + pod.Name, nil
}

func podAttrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, nil, fmt.Errorf("%T: not a Pod", obj)
	}
	return pod.Labels, fields.Set{"metadata.name": pod.Name, "spec.nodeName": pod.Spec.NodeName}, nil
}

// everything selects all Pods.
func everything() storage.SelectionPredicate {
	return storage.SelectionPredicate{Label: labels.Everything(), Field: fields.Everything(), GetAttrs: podAttrs}
}

// pod returns a Pod as a scheduler would first see it.
func pod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-" + name)},
		Spec: corev1.PodSpec{
			Containers:    []corev1.Container{{Name: "main", Image: "registry.example/app:1"}},
			RestartPolicy: corev1.RestartPolicyAlways,
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
}

func podKey(name string) string { return podsPrefix + "default/" + name }

// create stores a new Pod and returns it as stored.
func create(t *testing.T, store storage.Interface, name string) *corev1.Pod {
	t.Helper()
	out := &corev1.Pod{}
	if err := store.Create(t.Context(), podKey(name), pod(name), out, 0); err != nil {
		t.Fatalf("create %s: %v", name, err)
	}
	return out
}

// bind sets the node of a Pod and returns the Pod as stored.
func bind(ctx context.Context, store storage.Interface, name, node string) (*corev1.Pod, error) {
	out := &corev1.Pod{}
	err := store.GuaranteedUpdate(ctx, podKey(name), out, false, nil, storage.SimpleUpdate(
		func(obj runtime.Object) (runtime.Object, error) {
			p := obj.(*corev1.Pod)
			p.Spec.NodeName = node
			return p, nil
		}), nil)
	return out, err
}

// get returns the Pod as it is now.
func get(t *testing.T, store storage.Interface, name string) *corev1.Pod {
	t.Helper()
	out := &corev1.Pod{}
	if err := store.Get(t.Context(), podKey(name), storage.GetOptions{}, out); err != nil {
		t.Fatalf("get %s: %v", name, err)
	}
	return out
}

// remove deletes a Pod and returns it as it last was, at the revision of the delete.
func remove(t *testing.T, store storage.Interface, name string) *corev1.Pod {
	t.Helper()
	out := &corev1.Pod{}
	err := store.Delete(t.Context(), podKey(name), out, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
	if err != nil {
		t.Fatalf("delete %s: %v", name, err)
	}
	return out
}

// list lists all Pods with the options that change sets.
func list(t *testing.T, store storage.Interface, change func(*storage.ListOptions)) *corev1.PodList {
	t.Helper()
	opts := storage.ListOptions{Recursive: true, Predicate: everything()}
	if change != nil {
		change(&opts)
	}
	out := &corev1.PodList{}
	if err := store.GetList(t.Context(), podsPrefix, opts, out); err != nil {
		t.Fatalf("list at revision %q, limit %d: %v", opts.ResourceVersion, opts.Predicate.Limit, err)
	}
	return out
}

func names(l *corev1.PodList) []string {
	out := make([]string, 0, len(l.Items))
	for _, p := range l.Items {
		out = append(out, p.Name)
	}
	return out
}

func revision(t *testing.T, version string) uint64 {
	t.Helper()
	r, err := strconv.ParseUint(version, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// watchPods watches all Pods from the revision on, until the test ends.
func watchPods(t *testing.T, store storage.Interface, version string, change func(*storage.ListOptions)) watch.Interface {
	t.Helper()
	opts := storage.ListOptions{ResourceVersion: version, Recursive: true, Predicate: everything()}
	if change != nil {
		change(&opts)
	}
	w, err := store.Watch(t.Context(), podsPrefix, opts)
	if err != nil {
		t.Fatalf("watch from revision %q: %v", version, err)
	}
	t.Cleanup(w.Stop)
	return w
}

// next returns the next event.
func next(t *testing.T, w watch.Interface) watch.Event {
	t.Helper()
	limit := time.NewTimer(eventWithin)
	defer limit.Stop()
	select {
	case e, open := <-w.ResultChan():
		if !open {
			t.Fatal("the watch ended; want an event")
		}
		return e
	case <-limit.C:
		t.Fatalf("no event within %v", eventWithin)
		panic("not reached")
	}
}

// podOf returns the event's Pod; the watch cache hands out a shared one in a wrapper. Nil if the object is another.
func podOf(e watch.Event) *corev1.Pod {
	obj := e.Object
	if shared, ok := obj.(runtime.CacheableObject); ok {
		obj = shared.GetObject()
	}
	p, _ := obj.(*corev1.Pod)
	return p
}

// wantEvent fails unless the next event is of that type, Pod, node and revision.
func wantEvent(t *testing.T, w watch.Interface, kind watch.EventType, p *corev1.Pod) {
	t.Helper()
	e := next(t, w)
	got := podOf(e)
	if got == nil || e.Type != kind || got.Name != p.Name || got.Spec.NodeName != p.Spec.NodeName || got.ResourceVersion != p.ResourceVersion {
		t.Fatalf("event %s %+v; want %s %s on node %q at revision %s", e.Type, e.Object, kind, p.Name, p.Spec.NodeName, p.ResourceVersion)
	}
}

// waitFor calls try until it returns nil.
func waitFor(t *testing.T, what string, try func() error) {
	t.Helper()
	limit := time.NewTimer(eventWithin)
	defer limit.Stop()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		err := try()
		if err == nil {
			return
		}
		select {
		case <-again.C:
		case <-limit.C:
			t.Fatalf("waiting for %s: not within %v: %v", what, eventWithin, err)
		}
	}
}

// errNotYet is what waitFor tries again on.
var errNotYet = errors.New("not yet")
