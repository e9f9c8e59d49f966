package web

import (
	"encoding/json"
	"expvar"
	"net/http"
	"syscall"
)

// vars serves /debug/vars: the process' own variables, those of Options and the
// limit of open files.
func (o *Options) vars(w http.ResponseWriter, _ *http.Request) {
	all := map[string]any{}
	expvar.Do(func(kv expvar.KeyValue) { all[kv.Key] = json.RawMessage(kv.Value.String()) })
	if limit, err := fileLimit(); err == nil {
		all["file_descriptor_limit"] = limit
	} else {
		o.Logger.Warn("cannot read the limit of open files", "error", err)
	}
	for name, value := range o.Vars {
		all[name] = value()
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	writeJSON(w, o.Logger, all)
}

// fileLimit is how many files this process may have open.
func fileLimit() (uint64, error) {
	var limit syscall.Rlimit
	err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit)
	return limit.Cur, err
}
