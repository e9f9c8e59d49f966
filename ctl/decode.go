package ctl

import (
	"bytes"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/engram-kv/engram/internal/kubeobject"
)

const decodeHelp = `

With --decode the objects that Kubernetes keeps below /registry are printed for people: those in protobuf as YAML, those in JSON (as
custom resources are) indented. Kinds that this version does not know, and all other values, are printed as they are. What a Secret
holds is printed too, in base64 as in any manifest, unless the API server encrypts it: mind who reads along.`

func registerDecode(fs *pflag.FlagSet, decode *bool) {
	fs.BoolVar(decode, "decode", false, "print Kubernetes' objects as YAML, for the output format \"simple\"")
}

// setDecode has p print objects for people, which only one format does.
func setDecode(p printer, decode bool) error {
	if !decode {
		return nil
	}
	s, ok := p.(*simplePrinter)
	if !ok {
		return badArguments("--decode is only for `--write-out=simple`")
	}
	if s.hex {
		return badArguments("--decode and --hex cannot be set at the same time, choose one")
	}
	s.decode = true
	return nil
}

// value prints a value on lines of its own.
func (p *simplePrinter) value(kv *mvccpb.KeyValue) {
	if p.decode {
		if text, ok := kubeobject.Text(kv.GetValue()); ok {
			p.line(bytes.TrimSuffix(text, []byte("\n")))
			return
		}
	}
	p.line(kv.GetValue())
}
