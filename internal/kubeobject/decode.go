// Package kubeobject reads the objects that Kubernetes' API server keeps below /registry, for people.
//
// It knows the kinds of Kubernetes' own API groups that are stored. What it does not know, it leaves as it is.
package kubeobject

import (
	"bytes"
	"encoding/json"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"sigs.k8s.io/yaml"
)

// magic is what an object in protobuf begins with; a runtime.Unknown follows it.
var magic = []byte("k8s\x00")

// Text returns an object as a person can read it: one that is stored in protobuf as YAML, with its kind and version; one in JSON,
// as those of custom resources are, indented. ok is false for anything else, kinds that this version does not know included.
// It ends with a newline.
func Text(value []byte) (text []byte, ok bool) {
	switch {
	case bytes.HasPrefix(value, magic):
		text, err := yamlOf(value)
		return text, err == nil
	case len(value) > 0 && value[0] == '{':
		var b bytes.Buffer
		if json.Indent(&b, bytes.TrimRight(value, "\n"), "", "  ") != nil {
			return nil, false
		}
		b.WriteByte('\n')
		return b.Bytes(), true
	}
	return nil, false
}

// decoder is made when it is first needed: most runs of the program never do.
var decoder = sync.OnceValue(func() *protobuf.Serializer {
	scheme := runtime.NewScheme()
	for _, add := range groups {
		if err := add(scheme); err != nil {
			panic(fmt.Sprintf("kubeobject: %v", err)) // two groups claim the same kind
		}
	}
	return protobuf.NewSerializer(scheme, scheme)
})

func yamlOf(value []byte) ([]byte, error) {
	object, kind, err := decoder().Decode(value, nil, nil)
	if err != nil {
		return nil, err
	}
	object.GetObjectKind().SetGroupVersionKind(*kind)
	return yaml.Marshal(object)
}
