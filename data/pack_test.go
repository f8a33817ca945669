package data

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// TestPacksAgreeWithPython compares packed rows, token by token, with a Python implementation of
// TRL's rules.
func TestPacksAgreeWithPython(t *testing.T) {
	golden, err := os.ReadFile("testdata/packs.jsonl")
	require.NoError(t, err)
	packsAgree(t, golden, 9)
}

func TestPacksAgreeWithPythonNow(t *testing.T) {
	long.Only(t)
	seed := fmt.Sprint(os.Getpid())
	t.Log("seed", seed)
	out, err := exec.Command("python3", "../internal/jinja/testdata/reference.py", "packs", seed, "500").Output()
	require.NoError(t, err)
	packsAgree(t, out, 100)
}

// packsAgree compares packed rows with golden; it requires at least the given number of rows, some
// with several documents.
func packsAgree(t *testing.T, golden []byte, least int) {
	lines, all, several := bufio.NewScanner(bytes.NewReader(golden)), 0, 0
	lines.Buffer(nil, 1<<26)
	for lines.Scan() {
		var p struct {
			Template string
			Seq      int
			Messages []json.RawMessage
			Rows     []struct{ Tokens, Positions, Targets []int32 }
		}
		require.NoError(t, json.Unmarshal(lines.Bytes(), &p))
		ch := chatOf(t, p.Template)
		c := &Conversations{o: ChatOptions{Seq: p.Seq, Vocab: 300, Starts: "starts"}, hash: sha256.New(), starts: []int64{0}, values: &builder{width: 4}}
		for _, m := range p.Messages {
			one, err := ch.encode(marshal(t, map[string]any{"messages": m}))
			require.NoError(t, err)
			require.NoError(t, c.add(&one))
		}
		var err error
		c.buffer, err = c.values.finish()
		require.NoError(t, err)
		c.arrange()
		require.EqualValues(t, len(p.Rows), c.Len(), p.Template)
		for i, want := range p.Rows {
			shape := Shape{Tokens: p.Seq, Targets: p.Seq, Inputs: []InputSize{{"starts", p.Seq}}}
			r := shape.row(shape.NewMicro(1), 0)
			require.NoError(t, c.Sample(int64(i), r))
			n := len(want.Tokens)
			require.Equal(t, want.Tokens, r.Tokens[:n], "%s row %d", p.Template, i)
			require.Equal(t, want.Targets, r.Targets[:n], "%s row %d", p.Template, i)
			counted := 0
			for k, v := range r.Inputs[0].Values {
				if k < n {
					require.Equal(t, want.Positions[k], int32(k)-int32(v), "%s row %d, token %d", p.Template, i, k)
				} else {
					require.Equal(t, []int32{int32(n), 0, -1}, []int32{int32(v), r.Tokens[k], r.Targets[k]}, "the row's rest is a document without targets")
				}
				if r.Targets[k] >= 0 {
					counted++
				}
			}
			require.Equal(t, counted, c.CountTargets(int64(i)))
			if slices.Index(want.Positions[1:], 0) >= 0 {
				several++
			}
			all++
		}
		require.NoError(t, c.Close())
	}
	require.NoError(t, lines.Err())
	require.GreaterOrEqual(t, all, least)
	require.Greater(t, several, all/10)
}

// TestPack packs documents of random lengths. Each document must be in one row and no row may be
// over its size. The first document of a row must not fit into any earlier row.
func TestPack(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	for range 300 {
		seq := 1 + r.IntN(100)
		lengths := make([]int, 1+r.IntN(80))
		for i := range lengths {
			lengths[i] = 1 + r.IntN(1+r.IntN(seq))
		}
		docs, rows := pack(lengths, seq)
		seen := make([]bool, len(lengths))
		var free []int
		for i := range len(rows) - 1 {
			room := seq
			for _, before := range free {
				require.Less(t, before, lengths[docs[rows[i]]])
			}
			for _, d := range docs[rows[i]:rows[i+1]] {
				require.False(t, seen[d])
				seen[d] = true
				room -= lengths[d]
			}
			require.GreaterOrEqual(t, room, 0)
			free = append(free, room)
		}
		require.NotContains(t, seen, false)
	}
	docs, rows := pack(nil, 4)
	require.Empty(t, docs)
	require.Equal(t, []int32{0}, rows)
}
