package data

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

func gzipped(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := w.Write([]byte(text))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.String()
}

func zstded(t *testing.T, text string) string {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	return string(w.EncodeAll([]byte(text), nil))
}

const records = `{"id": 1, "text": "Hello"}` + "\n\n" + `{"text":"","id":2}` + "\n" + `{"text": null}` + "\n" + `{"text": " world\n"}`

// TestFormats checks that every file format of the same text gives the same tokens.
func TestFormats(t *testing.T) {
	want := []int32{15496, 50256, 995, 198}
	dir := folder(t, map[string]string{
		"plain.txt": "Hello", "a.txt.gz": gzipped(t, "Hello"), "a.txt.zst": zstded(t, "Hello"), "noext": "Hello", "A.GZ": gzipped(t, "Hello"),
		"a.jsonl": records, "a.jsonl.gz": gzipped(t, records), "a.jsonl.zst": zstded(t, records), "a.ndjson": records,
	})
	o := Options{Tokenizer: token.GPT2(), TextField: "text"}
	for _, name := range []string{"plain.txt", "a.txt.gz", "a.txt.zst", "noext", "A.GZ"} {
		b, err := Open(context.Background(), filepath.Join(dir, name), o)
		require.Equal(t, want[:1], all(t, b, err), name)
	}
	for _, name := range []string{"a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.ndjson"} {
		b, err := Open(context.Background(), filepath.Join(dir, name), o)
		require.Equal(t, want, all(t, b, err), name)
	}
}

// TestOtherFormats checks that the error for a file that is not text says what to do. In a folder
// such files are left out and counted.
func TestOtherFormats(t *testing.T) {
	files := map[string]string{
		"a.jsonl": records, "b.json": "{}", "c.html": "<p>", "d.htm.gz": gzipped(t, "<p>"), "e.arrow": "ARROW1", "f.bin": "ab", "g.bin.zst": zstded(t, "ab"),
		"h.dat": "a\x00b", "i.gz": gzipped(t, "\xff\xfe"), "z.txt": "text",
	}
	dir := folder(t, files)
	for name, says := range map[string]string{
		"a.jsonl": "as in Options.TextField text", "b.json": "make it JSON lines", "c.html": "extract its text", "d.htm.gz": "extract its text", "e.arrow": "export it as Parquet",
		"g.bin.zst": "decompress it first", "h.dat": "is not text: a NUL byte at offset 1", "i.gz": "is not text: byte 0xff",
	} {
		_, err := Open(context.Background(), filepath.Join(dir, name), Options{})
		require.ErrorContains(t, err, says, name)
		require.ErrorContains(t, err, filepath.Join(dir, name))
	}
	b, err := Open(context.Background(), dir, Options{})
	require.Equal(t, "text", token.Bytes().Decode(all(t, b, err)))
	require.Equal(t, "1 .html, 1 .htm, 1 .json, 1 .jsonl (no Options.TextField), 1 .arrow, 2 .bin, 2 not UTF-8 text", sortedParts(b.LeftOut()))
	b, err = Open(context.Background(), dir, Options{TextField: "text"})
	require.Equal(t, "Hello world\ntext", token.Bytes().Decode(all(t, b, err)))
	require.NotContains(t, b.LeftOut(), "jsonl")
	_, err = Open(context.Background(), folder(t, map[string]string{"a.json": "[]"}), Options{})
	require.ErrorContains(t, err, "left out: 1 .json")
}

func sortedParts(s string) string {
	parts := strings.Split(s, ", ")
	order := []string{".html", ".htm", ".json", ".jsonl (no Options.TextField)", ".arrow", ".bin", notText}
	slices.SortFunc(parts, func(a, b string) int {
		_, x, _ := strings.Cut(a, " ")
		_, y, _ := strings.Cut(b, " ")
		return slices.Index(order, x) - slices.Index(order, y)
	})
	return strings.Join(parts, ", ")
}

func TestBadRecords(t *testing.T) {
	for line, says := range map[string]string{
		`{"text": "a"`: "not a JSON object", `["text"]`: "not a JSON object", `{"body": "a"}`: `no field "text"`, `{"text": 3}`: `field "text" is not a string`,
		"{\"text\": \"\xff\"}": "not UTF-8",
	} {
		path := put(t, "a.jsonl", []byte(`{"text":"fine"}`+"\n"+line+"\n"))
		_, err := Open(context.Background(), path, Options{TextField: "text"})
		require.ErrorContains(t, err, says)
		require.ErrorContains(t, err, path+":2")
	}
}

func TestDamagedCompression(t *testing.T) {
	for suffix, whole := range map[string]string{".gz": gzipped(t, strings.Repeat("some text ", 5000)), ".zst": zstded(t, strings.Repeat("some text ", 5000))} {
		for what, content := range map[string]string{"cut": whole[:len(whole)-3], "empty": "", "other": "plain text that is none"} {
			path := put(t, "a.txt"+suffix, []byte(content))
			_, err := Open(context.Background(), path, Options{})
			require.ErrorContains(t, err, path, "%s %s", suffix, what)
			if content != "" { // an empty file is valid: it has no compression frame
				_, err = Open(context.Background(), filepath.Dir(path), Options{})
				require.ErrorContains(t, err, path, "%s %s in a folder", suffix, what)
			}
		}
	}
}

// corpusForTests returns a folder with files of every kind, one larger than a piece.
func corpusForTests(t *testing.T) string {
	line := "The quick brown fox's 123 jumps; über — “quoted” 中文 text.\n"
	var lines strings.Builder
	for i := range 4000 {
		fmt.Fprintf(&lines, "{\"n\": %d, \"text\": %q}\n", i, strings.Repeat("word ", i%40))
	}
	return folder(t, map[string]string{
		"a.txt": strings.Repeat(line, 3*readBytes/len(line)), "b.jsonl": lines.String(), "c.txt.zst": zstded(t, strings.Repeat(line, 500)),
		"d.txt": strings.Repeat(line, 2*readBytes/len(line)) + "\xff", "e": "the end", "f.json": "{}",
	})
}

// TestTokenize checks that a token file has the tokens of OpenText at any number of threads.
func TestTokenize(t *testing.T) {
	dir := corpusForTests(t)
	for _, tok := range []token.Tokenizer{token.GPT2(), token.Bytes(), wideTokenizer{token.Bytes()}} {
		o := Options{Tokenizer: tok, TextField: "text"}
		b, err := OpenText(context.Background(), dir, o)
		want := all(t, b, err)
		for _, threads := range []int{1, 3} {
			out := filepath.Join(t.TempDir(), "new", "tokens.bin")
			o.Threads = threads
			told := Progress{}
			res, err := Tokenize(context.Background(), out, []string{dir}, o, func(p Progress) { told = p })
			require.NoError(t, err)
			require.Equal(t, Tokenized{Tokens: int64(len(want)), Files: 4, LeftOut: "1 .json, 1 not UTF-8 text", TokenLen: res.TokenLen}, res)
			require.Equal(t, told.OfBytes, told.Bytes)
			require.Equal(t, res.Tokens, told.Tokens)
			got, err := OpenTokenFile(out, tok.VocabSize())
			require.True(t, slices.Equal(want, all(t, got, err)))
			left, err := os.ReadDir(filepath.Dir(out))
			require.NoError(t, err)
			require.Len(t, left, 1, "nothing stays beside the file")
		}
	}
}

// TestTokenizeGoesOn interrupts Tokenize at different pieces. The same call must continue and write
// the same file.
func TestTokenizeGoesOn(t *testing.T) {
	dir := corpusForTests(t)
	o := Options{Tokenizer: token.GPT2(), TextField: "text"}
	whole := filepath.Join(t.TempDir(), "w.bin")
	_, err := Tokenize(context.Background(), whole, []string{dir}, o, nil)
	require.NoError(t, err)
	want, err := os.ReadFile(whole)
	require.NoError(t, err)
	for stop := 1; stop <= 9; stop++ {
		if stop%3 != 0 && !long.On() {
			continue
		}
		// With .partial.json this is the longest name that most file systems allow.
		out := filepath.Join(t.TempDir(), strings.Repeat("t", 238)+".bin")
		ctx, cancel := context.WithCancel(context.Background())
		n := 0
		_, err := Tokenize(ctx, out, []string{dir}, o, func(Progress) {
			if n++; n == stop {
				cancel()
			}
		})
		require.ErrorIs(t, err, context.Canceled)
		cancel()
		require.NoFileExists(t, out)
		// Bytes after the last safe position are ignored.
		f, err := os.OpenFile(out+".partial", os.O_APPEND|os.O_WRONLY, 0)
		require.NoError(t, err)
		_, err = f.WriteString("lost")
		require.NoError(t, err)
		require.NoError(t, f.Close())

		_, err = Tokenize(context.Background(), out, []string{dir}, Options{TextField: "text"}, nil)
		require.ErrorContains(t, err, "was begun with tokenizer gpt2")
		res, err := Tokenize(context.Background(), out, []string{dir}, o, nil)
		require.NoError(t, err)
		require.True(t, res.Resumed)
		require.Equal(t, "1 .json, 1 not UTF-8 text", res.LeftOut)
		got, err := os.ReadFile(out)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, got), "stopped at %d", stop)
	}
}

func TestTokenizeRefuses(t *testing.T) {
	dir := folder(t, map[string]string{"a.txt": "abc", "b.html": ""})
	in := filepath.Join(dir, "a.txt")
	_, err := Tokenize(context.Background(), in, []string{dir}, Options{}, nil)
	require.ErrorContains(t, err, "one of the files that are read")
	_, err = Tokenize(context.Background(), filepath.Join(dir, "o.bin"), []string{filepath.Join(dir, "b.html")}, Options{}, nil)
	require.ErrorContains(t, err, "HTML")
	empty := put(t, "none.txt", nil)
	out := filepath.Join(t.TempDir(), "o.bin")
	_, err = Tokenize(context.Background(), out, []string{empty}, Options{}, nil)
	require.ErrorContains(t, err, "is empty")
	require.NoFileExists(t, out+".partial")
	require.NoError(t, os.WriteFile(out+".partial.json", []byte("{"), 0o644))
	_, err = Tokenize(context.Background(), out, []string{in}, Options{}, nil)
	require.ErrorContains(t, err, "remove it")
}
