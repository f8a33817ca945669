package data

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/data/token"
)

// TestALongStretchIsCut checks text that has no place to cut for longer than longStretch: it must
// be cut anyway. Reading from any cut position on must give the same cuts.
func TestALongStretchIsCut(t *testing.T) {
	if testing.Short() {
		t.Skip()
	}
	lines := strings.Repeat("。\n文。", longStretch/10) // each line starts with a letter
	text := "a few words " + strings.Repeat("a", longStretch+longStretch/2) + " and " + lines + strings.Repeat("é", longStretch)
	path := put(t, "a.txt", []byte(text))
	cuts := func(from int64) (ends []int64) {
		c, err := listCorpus([]string{path}, Options{Tokenizer: token.GPT2()})
		require.NoError(t, err)
		d := &documents{c: c, o: Options{}, cutter: token.GPT2().(token.Cutter), give: func(p *piece) error {
			require.LessOrEqual(t, len(p.parts[0].text), longStretch)
			ends = append(ends, p.end)
			return nil
		}}
		require.NoError(t, d.run(position{Offset: from}))
		return ends
	}
	forced := func(ends []int64) (list []int64) {
		for _, at := range ends {
			if at < int64(len(text)) && text[at] != ' ' {
				list = append(list, at)
				if text[at-1] == '\n' || text[at] == 'a' {
					continue
				}
				require.Equal(t, "é", text[at:at+2], "between characters")
			}
		}
		return list
	}
	all := cuts(0)
	require.EqualValues(t, len(text), all[len(all)-1])
	want := forced(all)
	require.Greater(t, len(want), 2)
	for _, from := range []int64{all[0], want[1]} {
		got := forced(cuts(from))
		require.Equal(t, want[len(want)-len(got):], got, "from %d", from)
	}
}
