package doctor

import (
	"os"
	"testing"

	"github.com/engram-kv/engram/test/internal/race"
)

func TestMain(m *testing.M) { os.Exit(race.Main(m.Run)) }
