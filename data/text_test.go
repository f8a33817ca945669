package data

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/data/token"
)

// folder writes files, keyed by path, to a new folder and returns its path.
func folder(t testing.TB, files map[string]string) string {
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
	}
	return dir
}

// all reads a Buffer's tokens and closes it.
func all(t testing.TB, b *Buffer, err error) []int32 {
	t.Helper()
	require.NoError(t, err)
	defer b.Close()
	out := make([]int32, b.Len())
	require.NoError(t, b.Tokens(out, 0))
	return out
}

func text(t testing.TB, path string, o Options) string {
	t.Helper()
	b, err := Open(context.Background(), path, o)
	return token.Bytes().Decode(all(t, b, err))
}

func TestFolderInNameOrder(t *testing.T) {
	dir := folder(t, map[string]string{
		"b.txt": "B", "a/z.go": "Z", "a.txt": "A", "a/b/c.txt": "C", "a-b/x": "X",
		"binary": "q\x00q", "latin1": "caf\xe9", "empty": "", "tokens.bin": "\x01\x00",
		".git/config": "no", ".hidden": "H",
	})
	// Files are sorted by the elements of their paths: a/… comes before a-b and a.txt.
	require.Equal(t, "HCZXAB", text(t, dir, Options{}))
	require.Equal(t, "Z", text(t, dir, Options{Glob: "*.go"}))
	require.Equal(t, "A", text(t, filepath.Join(dir, "a.txt"), Options{Glob: "*.go"}), "a file that is named is read")
	require.Equal(t, Shuffled, DefaultOrder(dir))
	require.Equal(t, Sequential, DefaultOrder(filepath.Join(dir, "a.txt")))
}

func TestTextErrors(t *testing.T) {
	dir := folder(t, map[string]string{"binary": "q\x00q", "latin1": "caf\xe9", "sub/empty": "", "train.bin": "\x01\x00", "cut": "abc\xe2\x82"})
	for path, want := range map[string]string{
		dir:                        "folder " + dir + " has no text",
		filepath.Join(dir, "sub"):  "no text",
		filepath.Join(dir, "none"): "does not exist",
		"/dev/null":                "neither a regular file nor a folder",

		filepath.Join(dir, "binary"):    "a NUL byte at offset 1",
		filepath.Join(dir, "latin1"):    "byte 0xe9 is not UTF-8 at offset 3",
		filepath.Join(dir, "cut"):       "byte 0xe2 is not UTF-8 at offset 3",
		filepath.Join(dir, "sub/empty"): "is empty",
	} {
		_, err := Open(context.Background(), path, Options{})
		require.ErrorContains(t, err, want, path)
		require.ErrorContains(t, err, path)
		require.NotContains(t, err.Error(), "\n")
	}
	_, err := Open(context.Background(), dir, Options{})
	require.ErrorContains(t, err, "train.bin", "a hint where the tokens are")
	_, err = Open(context.Background(), folder(t, map[string]string{"a.txt": "x"}), Options{Glob: "*.go"})
	require.ErrorContains(t, err, "matches *.go")
	_, err = Open(context.Background(), dir, Options{Glob: "["})
	require.ErrorContains(t, err, `"["`)
}

func TestLinks(t *testing.T) {
	dir := folder(t, map[string]string{"a/x": "X", "other": "O"})
	elsewhere := folder(t, map[string]string{"y": "Y"})
	require.NoError(t, os.Symlink(elsewhere, filepath.Join(dir, "b")))
	require.NoError(t, os.Symlink(filepath.Join(dir, "a", "x"), filepath.Join(dir, "c")))
	require.Equal(t, "XYXO", text(t, dir, Options{}))

	loop := filepath.Join(dir, "a", "loop")
	require.NoError(t, os.Symlink(dir, loop))
	_, err := Open(context.Background(), dir, Options{})
	require.ErrorContains(t, err, loop)
	require.ErrorContains(t, err, "leads back")
	require.NoError(t, os.Remove(loop))

	require.NoError(t, os.Symlink("nowhere", filepath.Join(dir, "dangling.txt")))
	_, err = Open(context.Background(), dir, Options{})
	require.ErrorContains(t, err, "dangling.txt is a link that leads nowhere")
	require.Equal(t, "O", text(t, dir, Options{Glob: "oth*"}), "what does not match is not looked at")
	_, err = Open(context.Background(), dir, Options{Glob: "*.md"})
	require.ErrorContains(t, err, "folder "+dir+" has no file that matches *.md")
}

func TestUnreadable(t *testing.T) {
	dir := folder(t, map[string]string{"a": "A", "secret": "S"})
	secret := filepath.Join(dir, "secret")
	require.NoError(t, os.Chmod(secret, 0))
	if f, err := os.Open(secret); err == nil {
		f.Close()
		t.Skip("this user reads everything")
	}
	_, err := Open(context.Background(), dir, Options{})
	require.ErrorContains(t, err, secret)
}

// TestEndOfText checks that EOT separates files if the tokenizer has it, and that skipped files add
// no tokens.
func TestEndOfText(t *testing.T) {
	dir := folder(t, map[string]string{"1": "Hello", "2": "", "3": "x\x00", "4": " world", "5": "\xff"})
	b, err := Open(context.Background(), dir, Options{Tokenizer: token.GPT2()})
	require.Equal(t, []int32{15496, 50256, 995}, all(t, b, err))
	b, err = Open(context.Background(), filepath.Join(dir, "1"), Options{Tokenizer: token.GPT2()})
	require.Equal(t, []int32{15496}, all(t, b, err))
}

func TestBeyondTheModelsVocabulary(t *testing.T) {
	path := put(t, "a.txt", []byte("Hi Hello"))
	_, err := Open(context.Background(), path, Options{Tokenizer: token.GPT2(), Vocab: 10000})
	require.ErrorContains(t, err, "token 0 of "+path)
	require.ErrorContains(t, err, "is 17250, beyond the model's vocabulary of 10000")
	require.ErrorContains(t, err, "gpt2 has 50257")
	_, err = Open(context.Background(), put(t, "a.txt", []byte("abz")), Options{Vocab: 'z'})
	require.ErrorContains(t, err, "token 2 of ")
	require.ErrorContains(t, err, "is 122")
}

// TestStreamedTextIsTheWhole checks that reading in pieces, spilling and rolling back change no
// token. A large folder must equal its files tokenized separately.
func TestStreamedTextIsTheWhole(t *testing.T) {
	if testing.Short() {
		t.Skip()
	}
	line := "The quick brown fox's 123 jumps; über — “quoted” 中文 text.\n"
	large := strings.Repeat(line, 2*readBytes/len(line))
	noCut := strings.Repeat("。，", 3*readBytes/6/2)       // no place to cut
	split := strings.Repeat("a", readBytes-1) + "é rest" // a character over the border of two reads
	dir := folder(t, map[string]string{"1": large, "2": large + "\x00", "3": noCut, "4": split, "5": large[:readBytes+100] + "\xff", "6": "end"})
	parts := []string{large, noCut, split, "end"}

	b, err := Open(context.Background(), dir, Options{})
	require.NoError(t, err)
	require.Empty(t, b.data, "in a file")
	require.Equal(t, int64(1), b.width)
	require.True(t, strings.Join(parts, "") == token.Bytes().Decode(all(t, b, err)))

	var want []int32
	for i, p := range parts {
		if i > 0 {
			want = append(want, token.GPT2().EOT())
		}
		want = append(want, token.GPT2().Encode(p)...)
	}
	b, err = Open(context.Background(), dir, Options{Tokenizer: token.GPT2()})
	require.True(t, slices.Equal(want, all(t, b, err)))
}

// TestSpill checks that a builder over its memory limit writes to an unnamed file, with the same
// tokens.
func TestSpill(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	name := put(t, "a.txt", nil)
	for width, tok := range map[int]token.Tokenizer{1: token.Bytes(), 2: token.GPT2(), 4: wideTokenizer{token.Bytes()}} {
		b := newBuilder(name, Options{Tokenizer: tok})
		require.Equal(t, width, b.width)
		var want []int32
		add := func(n int) {
			tokens := make([]int32, n)
			for i := range tokens {
				tokens[i] = int32((len(want) + i) * 7 % tok.VocabSize())
			}
			want = append(want, tokens...)
			require.NoError(t, b.append(tokens, name))
			require.NoError(t, b.spill(1000))
		}
		back := func(n int64) {
			require.NoError(t, b.rollBack(n))
			want = want[:n]
		}
		add(600)
		add(5000)
		add(3)
		require.NotNil(t, b.file)
		back(5601) // rolls back in memory
		add(10)
		back(300) // rolls back in the file
		add(4000)
		add(1)
		out, err := b.finish()
		require.Equal(t, want, all(t, out, err))
		b.discard()
	}
	left, err := os.ReadDir(tmp)
	require.NoError(t, err)
	require.Empty(t, left)
	t.Setenv("TMPDIR", filepath.Join(tmp, "none"))
	b := newBuilder(name, Options{Tokenizer: token.Bytes()})
	require.NoError(t, b.append(make([]int32, 10), name))
	require.ErrorContains(t, b.spill(1), "TMPDIR")
}

type wideTokenizer struct{ token.Tokenizer }

func (wideTokenizer) VocabSize() int { return 100_000 }

type wrongTokenizer struct{ wideTokenizer }

func (wrongTokenizer) Encode(string) []int32 { return []int32{100_000} }

// TestWrongTokenizer checks that a tokenizer that returns a token outside its vocabulary gives an
// error.
func TestWrongTokenizer(t *testing.T) {
	_, err := Open(context.Background(), put(t, "a.txt", []byte("a")), Options{Tokenizer: wrongTokenizer{wideTokenizer{token.Bytes()}}})
	require.ErrorContains(t, err, "gave token 100000")
}

func FuzzText(f *testing.F) {
	f.Add([]byte("abc é\n"), 3)
	f.Add([]byte("a\x00"), 1)
	f.Add([]byte("\xe2\x82\xac\xe2\x82"), 4)
	f.Fuzz(func(t *testing.T, content []byte, at int) {
		whole, part := 0, 0
		want := checkText(content, &whole, true)
		// Check the same text in two parts.
		at = min(max(at, 0), len(content))
		got := checkText(content[:at], &part, false)
		if got == nil {
			require.LessOrEqual(t, part, at)
			got = checkText(content, &part, true)
		}
		require.Equal(t, want == nil, got == nil)
		if want == nil {
			require.Equal(t, len(content), part)
		}
	})
}

// TestOpeningEndsWithItsContext checks that opening a text stops when its context is canceled.
func TestOpeningEndsWithItsContext(t *testing.T) {
	dir := folder(t, map[string]string{"a.txt": "one", "b/c.txt": "two"})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := Open(ctx, dir, Options{})
	require.ErrorIs(t, err, context.Canceled)
	b, err := Open(context.Background(), dir, Options{})
	require.NoError(t, err)
	require.NoError(t, b.Close())
}
