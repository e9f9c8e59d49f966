package operations

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
)

// TestLook types what the page has for looking at a cluster that is well, but for how fast this machine's disk is, of which the doctor may complain.
func TestLook(t *testing.T) {
	r := begin(t, 3)
	r.load()
	at := r.c.Members()[0].Endpoint()
	out, errs, err := r.typeBlock("doctor", "10.0.0.1:2379", at)
	if e, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || e.ExitCode() > 2) || !strings.Contains(out, "3 members examined in ") {
		t.Errorf("doctor: %v\n%s%s", err, out, errs)
	}
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "ERROR") && !strings.Contains(line, "(99 of 100)") {
			t.Errorf("doctor: %s", line)
		}
	}
	if told := r.block("du", "10.0.0.1:2379", at); strings.Count(told, "(total at revision ") != 2 || !strings.Contains(told, "victim") {
		t.Errorf("du:\n%s", told)
	}
	if told := r.block("top", "10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379", strings.Join(r.endpoints(), ",")); !strings.Contains(told, "3 members: ") {
		t.Errorf("top:\n%s", told)
	}
	if told := r.span(at, "engram ctl endpoint status --cluster -w table"); strings.Count(told, "3.7.") < 3 {
		t.Errorf("status:\n%s", told)
	}
	r.oneHash(r.span(at, "engram ctl endpoint hashkv --cluster"), 3)
}

// TestLookAtAnObject stores what an API server would.
func TestLookAtAnObject(t *testing.T) {
	r := begin(t, 1)
	at := r.c.Members()[0].Endpoint()
	scheme := runtime.NewScheme()
	r.must(corev1.AddToScheme(scheme))
	pod := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Name: "web-0", Namespace: "default"},
		Spec: corev1.PodSpec{NodeName: "n1"},
	}
	var stored strings.Builder
	r.must(protobuf.NewSerializer(scheme, scheme).Encode(pod, &stored))
	c := r.client()
	changes, complaints := r.follow(r.spanCommand(at, "engram ctl watch /registry/pods/ --prefix --decode"))
	shown := make(chan bool, 1)
	go func() {
		for changes.Scan() && changes.Text() != "  nodeName: n1" {
		}
		shown <- changes.Text() == "  nodeName: n1"
	}()
	puts := 0
	r.until("the watch shows the pod", func() error { // it is put again until somebody watches
		_, err := c.Put(r.ctx, "/registry/pods/default/web-0", stored.String())
		r.must(err)
		puts++
		select {
		case ok := <-shown:
			if !ok {
				r.Fatalf("the watch ended: %s", complaints)
			}
			return nil
		default:
			return errors.New("not yet")
		}
	})
	for _, want := range []string{"/registry/pods/default/web-0\napiVersion: v1\nkind: Pod\n", "\n  name: web-0\n", "\n  nodeName: n1\n"} {
		if told := r.span(at, "engram ctl get /registry/pods/default/web-0 --decode"); !strings.Contains(told, want) {
			t.Errorf("%q is not in:\n%s", want, told)
		}
	}
	if told := r.span(at, "engram ctl du /"); !strings.Contains(told, "/registry/") || !strings.Contains(told, fmt.Sprintf("(total at revision %d)", 1+puts)) {
		t.Errorf("du:\n%s", told)
	}
}

// TestHashOfABackup: it is what the member answers that the backup is of, and one that was restored from it.
func TestHashOfABackup(t *testing.T) {
	r := begin(t, 1)
	r.load()
	m := r.c.Members()[0]
	_, err := r.client().Compact(r.ctx, 100)
	r.must(err)
	backup := filepath.Join(t.TempDir(), "engram.db")
	r.save(m, backup)
	want := strings.TrimSpace(r.span(m.Endpoint(), "engram util snapshot hashkv /backup/engram.db", "/backup/engram.db", backup))
	same := func(who string) {
		t.Helper()
		told := r.span(m.Endpoint(), "engram ctl endpoint hashkv")
		if _, got, ok := strings.Cut(strings.TrimSpace(told), ", "); !ok || !strings.HasPrefix(want, got+", ") {
			t.Errorf("%s has %q, the backup %q", who, got, want)
		}
	}
	same("the member")
	r.must(m.Stop())
	r.must(os.RemoveAll(m.DataDir))
	if out, errs, err := r.run(r.p.Path, "util", "snapshot", "restore", backup, "--keep-revisions", "--data-dir", m.DataDir, "--name", m.Name,
		"--initial-cluster", m.Name+"="+m.PeerURL, "--initial-advertise-peer-urls", m.PeerURL); err != nil {
		t.Fatalf("restore: %v\n%s%s", err, out, errs)
	}
	r.must(m.Restart(r.ctx))
	same("the restored member")
}
