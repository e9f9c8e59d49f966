package kubeobject

import (
	"bytes"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// stored is an object as an API server stores it.
func stored(t *testing.T, object runtime.Object, gvk schema.GroupVersionKind) []byte {
	t.Helper()
	scheme := runtime.NewScheme()
	scheme.AddKnownTypeWithName(gvk, object)
	object.GetObjectKind().SetGroupVersionKind(gvk)
	var b bytes.Buffer
	if err := protobuf.NewSerializer(scheme, scheme).Encode(object, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestText(t *testing.T) {
	replicas := int32(3)
	limit := resource.MustParse("1500m")
	for _, c := range []struct {
		name   string
		object runtime.Object
		gvk    schema.GroupVersionKind
		want   string
	}{
		{
			"a secret",
			&corev1.Secret{
				ObjectMeta: metav1.ObjectMeta{Name: "s", Namespace: "ns", Labels: map[string]string{"app": "x"}},
				Data:       map[string][]byte{"password": []byte("hello")}, Type: corev1.SecretTypeOpaque,
			},
			schema.GroupVersionKind{Version: "v1", Kind: "Secret"},
			`apiVersion: v1
data:
  password: aGVsbG8=
kind: Secret
metadata:
  labels:
    app: x
  name: s
  namespace: ns
type: Opaque
`,
		},
		{
			"quantities, ports and times",
			&corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: "p"},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{
					Name: "c", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": limit}},
					LivenessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromString("web")}}},
				}}},
			},
			schema.GroupVersionKind{Version: "v1", Kind: "Pod"},
			`apiVersion: v1
kind: Pod
metadata:
  name: p
spec:
  containers:
  - livenessProbe:
      tcpSocket:
        port: web
    name: c
    resources:
      limits:
        cpu: 1500m
status: {}
`,
		},
	} {
		got, ok := Text(stored(t, c.object, c.gvk))
		if !ok || string(got) != c.want {
			t.Errorf("%s: %v\n%s", c.name, ok, got)
		}
	}
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "d"}, Spec: appsv1.DeploymentSpec{Replicas: &replicas}}
	got, ok := Text(stored(t, deployment, appsv1.SchemeGroupVersion.WithKind("Deployment")))
	if !ok || !strings.HasPrefix(string(got), "apiVersion: apps/v1\nkind: Deployment\n") || !strings.Contains(string(got), "\n  replicas: 3\n") {
		t.Errorf("%v\n%s", ok, got)
	}
}

func TestTextOfJSON(t *testing.T) {
	got, ok := Text([]byte(`{"apiVersion":"example.com/v1","kind":"Thing","spec":{"n":12345678901234567890,"s":"<&>"}}` + "\n"))
	want := `{
  "apiVersion": "example.com/v1",
  "kind": "Thing",
  "spec": {
    "n": 12345678901234567890,
    "s": "<&>"
  }
}
`
	if !ok || string(got) != want {
		t.Errorf("%v\n%s", ok, got)
	}
}

// TestLeftAsIs has values that are no objects, and kinds that nobody here knows.
func TestLeftAsIs(t *testing.T) {
	unknown := stored(t, &authenticationv1.TokenReview{}, schema.GroupVersionKind{Group: "example.com", Version: "v9", Kind: "Unheard"})
	secret := stored(t, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: strings.Repeat("n", 100)}}, schema.GroupVersionKind{Version: "v1", Kind: "Secret"})
	for _, value := range [][]byte{
		nil, []byte("plain"), []byte("{not json"), magic, append(bytes.Clone(magic), "garbage"...), unknown,
		secret[:len(secret)/2], []byte("k8s:enc:aescbc:v1:key1:xxxx"),
	} {
		if got, ok := Text(value); ok {
			t.Errorf("%q became %q", value, got)
		}
	}
}

func FuzzText(f *testing.F) {
	f.Add(append(bytes.Clone(magic), "\n\r\n\x02v1\x12\x06Secret\x12\x05\n\x03\n\x01s"...))
	f.Add([]byte(`{"a":1}`))
	f.Fuzz(func(t *testing.T, value []byte) {
		if text, ok := Text(value); ok && !bytes.HasSuffix(text, []byte("\n")) {
			t.Errorf("%q has no newline at its end", text)
		}
	})
}
