package data

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A word of many megabytes is merged in parts: the memory of merges is bounded, and the
// text comes back.
func TestALongWordIsMergedInParts(t *testing.T) {
	tok := GPT2().(*bpeTokenizer)
	word := strings.Repeat("gattaca", (2*longPiece+3)/7) + "é" + strings.Repeat("é", longPiece/2)
	tokens := tok.Encode(word)
	require.True(t, tok.Decode(tokens) == word)
	s := &scratch{cache: map[string][]int32{}}
	require.True(t, slices.Equal(tokens, tok.appendText(nil, word, 0, s)))
	require.LessOrEqual(t, cap(s.symbols), 2*longPiece)
	require.LessOrEqual(t, cap(s.queue), 4*longPiece)
	require.True(t, slices.Equal(tokens[:10], tok.Encode(word[:longPiece])[:10]))
}

// Text without a place to cut is cut all the same, where what follows the last place says
// so: whoever goes on from a place cuts in the same ones.
func TestALongStretchIsCut(t *testing.T) {
	if testing.Short() {
		t.Skip()
	}
	lines := strings.Repeat("。\n文。", longStretch/10) // each line starts with a letter
	text := "a few words " + strings.Repeat("a", longStretch+longStretch/2) + " and " + lines + strings.Repeat("é", longStretch)
	path := put(t, "a.txt", []byte(text))
	cuts := func(from int64) (ends []int64) {
		c, err := listCorpus([]string{path}, Options{Tokenizer: GPT2()})
		require.NoError(t, err)
		d := &documents{c: c, o: Options{}, cutter: GPT2().(cutter), give: func(p *piece) error {
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
