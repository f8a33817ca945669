package bench

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A rate is that of the job's own side, of all of its bytes.
func TestRate(t *testing.T) {
	report := `{"jobs": [{"read": {"io_bytes": 0, "runtime": 0}, "write": {"io_bytes": 4096, "runtime": 2}}]}`
	got, err := Fio{Write: true, Bytes: 4096}.rate([]byte(report))
	require.NoError(t, err)
	require.Equal(t, 4096/0.002, got)
	for says, c := range map[string]struct {
		job    Fio
		report string
	}{
		"fio moved 4096 bytes in 2 ms, want 8192": {Fio{Write: true, Bytes: 8192}, report},
		"fio moved 0 bytes in 0 ms, want 0":       {Fio{}, report},
		"of 0 jobs":                               {Fio{}, `{}`},
		"fio's report: ":                          {Fio{}, `fio: no space left`},
	} {
		_, err := c.job.rate([]byte(c.report))
		require.ErrorContains(t, err, says)
	}
}
