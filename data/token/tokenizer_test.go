package token

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"github.com/tiktoken-go/tokenizer/codec"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// randomText joins random strings that the split patterns treat differently.
func randomText(rng *rand.Rand, parts int) string {
	alphabet := []string{" ", " ", "  ", "\n", "\r\n", "\r", "\t", "\n\n", "a", "the", "Hello", "WORLD", "fooBar", "'s", "'S", "'ll", "'Ll", "'re", "'", "1", "23", "4567", "½", "٣", "é", "e\u0301", "ß", "中文", "日本", "🎉", "👩‍👩‍👧", ".", ",", "...", "//", ");", "{", "}", "\u00a0", "\u3000", "\u2028", "\u0085", "\x01", "_", "ǅ", "ʰ", "ſ", "'ſ", "K", "<|endoftext|>", "Ж", "’s"}
	var s strings.Builder
	for range parts {
		s.WriteString(alphabet[rng.IntN(len(alphabet))])
	}
	return s.String()
}

func encodeWith(t testing.TB, c *codec.Codec, text string) []int32 {
	ids, _, err := c.Encode(text)
	require.NoError(t, err)
	out := make([]int32, len(ids))
	for i, id := range ids {
		out[i] = int32(id)
	}
	return out
}

// sameTokens fails at the first difference and prints only the tokens around it.
func sameTokens(t testing.TB, want, got []int32, text string) {
	t.Helper()
	if slices.Equal(want, got) {
		return
	}
	i := 0
	for i < min(len(want), len(got)) && want[i] == got[i] {
		i++
	}
	t.Fatalf("tokens differ from %d on: want %v, got %v\nof %.300q", i, want[i:min(i+8, len(want))], got[i:min(i+8, len(got))], text)
}

func TestBytes(t *testing.T) {
	tok, err := Open("Bytes")
	require.NoError(t, err)
	require.Equal(t, []int32{0, 255, 65}, tok.Encode("\x00\xffA"))
	require.Equal(t, "\x00\xffA\uFFFD\uFFFD", tok.Decode([]int32{0, 255, 65, 256, -1}))
	require.Equal(t, 256, tok.VocabSize())
	require.Equal(t, int32(-1), tok.EOT())
}

func TestGPT2KnownTokens(t *testing.T) {
	tok, err := Open("GPT2")
	require.NoError(t, err)
	require.Equal(t, 50257, tok.VocabSize())
	require.Equal(t, int32(50256), tok.EOT())
	require.Equal(t, []int32{15496, 11, 995, 0}, tok.Encode("Hello, world!"))
	require.NotContains(t, tok.Encode("a<|endoftext|>b"), int32(50256))
	require.Equal(t, "<|endoftext|>\uFFFD", tok.Decode([]int32{50256, 50257}))
	require.Empty(t, tok.Encode(""))
}

// TestAgreesWithTiktoken compares the encoder with tiktoken: GPT-2's merges, and Llama 3's
// splitting and complete-word lookup, which are those of cl100k.
func TestAgreesWithTiktoken(t *testing.T) {
	r50k, cl100k := codec.NewR50kBase(), codec.NewCl100kBase()
	var tokens []string
	for i := range uint(100256) {
		text, err := cl100k.Decode([]uint{i})
		require.NoError(t, err)
		tokens = append(tokens, text)
	}
	model, err := bpeFromRanks(tokens)
	require.NoError(t, err)
	llama := load(t, tokenizerJSON(t, model, 100256, byteLevelAfter(splitStage(patternLlama3)), true, "<|spec"+"ial|>"))
	gpt2 := load(t, tokenizerJSON(t, GPT2().(*bpeTokenizer).model, 50256, byteLevel, false, "<|spec"+"ial|>"))
	rng := rand.New(rand.NewPCG(3, 4))
	texts := []string{strings.Repeat("x", 1000), strings.Repeat("=-", 300), strings.Repeat(" ", 500) + "x"}
	draws, oneIn := 60, uint64(6)
	if long.On() {
		draws = 1000
	}
	for range draws {
		texts = append(texts, randomText(rng, 30))
	}
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, f := range files {
		if !long.Keep(f, oneIn) {
			continue
		}
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		texts = append(texts, string(b))
	}
	for _, text := range texts {
		want := encodeWith(t, r50k, text)
		sameTokens(t, want, GPT2().Encode(text), text)
		sameTokens(t, want, gpt2.Encode(text), text)
		require.True(t, text == GPT2().Decode(want))
		if !strings.Contains(text, "ſ") { // tiktoken-go does not case-fold ſ; the original does
			sameTokens(t, encodeWith(t, cl100k, text), llama.Encode(text), text)
		}
		require.True(t, text == llama.Decode(llama.Encode(text)))
	}
}

// TestAgreesWithHuggingFace compares with the tokens of Hugging Face's tokenizers; testdata/want.js
// made them.
func TestAgreesWithHuggingFace(t *testing.T) {
	var texts []string
	var want map[string][][]int32
	for file, into := range map[string]any{"texts.json": &texts, "tokens.json": &want} {
		b, err := os.ReadFile(filepath.Join("testdata", file))
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(b, into))
	}
	require.Len(t, want, 9)
	for file, tokens := range want {
		tok, err := Open(filepath.Join("testdata", file))
		require.NoError(t, err)
		require.Len(t, tokens, len(texts))
		for i, text := range texts {
			got := tok.Encode(text)
			require.True(t, slices.Equal(tokens[i], got), "%s: %q\nwant %v\ngot  %v", file, text, tokens[i], got)
		}
		if tok.(*bpeTokenizer).meta != nil {
			require.Equal(t, int32(2), tok.EOT(), file)
			require.Equal(t, append([]int32{1}, tok.Encode("a b")...), Prompt(tok, "a b"), file)
			continue
		}
		require.GreaterOrEqual(t, tok.VocabSize(), 701)
		require.Equal(t, int32(700), tok.EOT(), file)
		require.Equal(t, tok.Encode("a b"), Prompt(tok, "a b"), file)
	}
}

// TestScannersAgreeWithPatterns checks that the hand-written scanners split like their regular
// expressions.
func TestScannersAgreeWithPatterns(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for pattern, first := range map[string]func(string) int{
		patternGPT2:   splitGPT2,
		patternLlama3: func(s string) int { return splitLlama(s, 3) },
		patternQwen2:  func(s string) int { return splitLlama(s, 1) },
	} {
		all := regexpSplit(pattern)
		for range 2000 {
			text := randomText(rng, 1+rng.IntN(25))
			var want, got []string
			all(text, func(piece string) { want = append(want, piece) })
			for rest := text; rest != ""; {
				n := first(rest)
				got = append(got, rest[:n])
				rest = rest[n:]
			}
			require.Equal(t, want, got, "%s\n%q", pattern, text)
		}
	}
}

// TestCutsChangeNothing checks that a text cut at Cut gives the same tokens as the complete text.
func TestCutsChangeNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	toks := []Tokenizer{Bytes(), GPT2()}
	for _, name := range []string{"llama3", "qwen2", "gpt4o", "gpt2", "digits", "mistral", "overspace", "metaspace", "llama2"} {
		tok, err := Load("testdata/tokenizer-" + name + ".json")
		require.NoError(t, err)
		toks = append(toks, tok)
	}
	cuts := map[string]int{}
	for range 500 {
		text := randomText(rng, 40)
		for i, tok := range toks {
			want := tok.Encode(text)
			at := tok.(Cutter).Cut([]byte(text), 0)
			if at == 0 {
				continue
			}
			cuts[tok.Name()]++
			require.True(t, slices.Equal(want, append(tok.Encode(text[:at]), tok.(Cutter).EncodeMore(text[at:])...)), "%d %q | %q", i, text[:at], text[at:])
		}
	}
	// Four may not be cut. llama3 and qwen2 have a token that strips the text after it, and gpt2 has
	// one that must be a word. digits puts a space before a text.
	require.Len(t, cuts, 7)
}

func TestConcurrentEncode(t *testing.T) {
	text := strings.Repeat("The quick brown fox's 123 jumps.\n", 50)
	want := GPT2().Encode(text)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				if !slices.Equal(want, GPT2().Encode(text)) {
					t.Error("another goroutine's work shows")
				}
			}
		})
	}
	wg.Wait()
}

// TestLongPiece encodes a piece of 128 KiB. The encoder needs n log n time; with n² the test would
// be too slow.
func TestLongPiece(t *testing.T) {
	text := strings.Repeat("abcdefgh", 1<<14)
	tokens := GPT2().Encode(text)
	require.True(t, text == GPT2().Decode(tokens))
	// The longest prefix that tiktoken encodes in acceptable time must agree. The text is periodic,
	// so later merges do not differ.
	short := text[:4000]
	sameTokens(t, encodeWith(t, codec.NewR50kBase(), short), GPT2().Encode(short), short)
}

func TestInvalidUTF8CountsAsReplacement(t *testing.T) {
	require.Equal(t, GPT2().Encode("a\uFFFD\uFFFDb"), GPT2().Encode("a\xff\xfeb"))
}

func TestTokenizerErrors(t *testing.T) {
	small := func() map[string]any {
		return tokenizerJSON(t, GPT2().(*bpeTokenizer).model, 300, byteLevel, false, "<|endoftext|>")
	}
	set := func(part, key string, value any) func(map[string]any) {
		return func(m map[string]any) { m[part].(map[string]any)[key] = value }
	}
	top := func(key string, value any) func(map[string]any) { return func(m map[string]any) { m[key] = value } }
	addedToken := func(id any, content string) func(map[string]any) {
		return func(m map[string]any) {
			m["added_tokens"] = append(m["added_tokens"].([]any), map[string]any{"id": id, "content": content})
		}
	}
	stage := func(typ string) map[string]any { return map[string]any{"type": typ} }
	for name, tc := range map[string]struct {
		change func(map[string]any)
		want   string
	}{
		"WordPiece":         {set("model", "type", "WordPiece"), `"WordPiece"`},
		"Unigram":           {set("model", "type", "Unigram"), `"Unigram"`},
		"WordLevel":         {set("model", "type", "WordLevel"), `"WordLevel"`},
		"no model":          {top("model", nil), "no model"},
		"no merges":         {set("model", "merges", nil), "merges"},
		"byte fallback":     {func(m map[string]any) { set("model", "byte_fallback", true)(m); delete(m, "decoder") }, "byte 0x00"},
		"its decoder":       {set("model", "byte_fallback", true), "decoder"},
		"dropout":           {set("model", "dropout", 0.1), "dropout"},
		"prefix":            {set("model", "continuing_subword_prefix", "##"), "##"},
		"suffix":            {set("model", "end_of_word_suffix", "</w>"), "</w>"},
		"normalizer":        {top("normalizer", stage("Lowercase")), `"Lowercase"`},
		"normalizers":       {top("normalizer", map[string]any{"type": "Sequence", "normalizers": []any{stage("NFC"), stage("Strip")}}), `"Strip"`},
		"Prepend of others": {top("normalizer", map[string]any{"type": "Prepend", "prepend": "x"}), `"x"`},
		"Replace of others": {top("normalizer", map[string]any{"type": "Replace", "pattern": map[string]any{"Regex": " "}, "content": "▁"}), "Replace"},
		"Prepend and bytes": {top("normalizer", map[string]any{"type": "Prepend", "prepend": "▁"}), "byte_fallback"},
		"no pre-tokenizer":  {top("pre_tokenizer", nil), "pre_tokenizer"},
		"pre-tokenizer":     {top("pre_tokenizer", stage("Metaspace")), `"Metaspace"`},
		"no ByteLevel":      {top("pre_tokenizer", stage("Digits")), "ByteLevel"},
		"after ByteLevel":   {top("pre_tokenizer", map[string]any{"type": "Sequence", "pretokenizers": []any{byteLevel, stage("Digits")}}), `"Digits" follows`},
		"pattern":           {top("pre_tokenizer", byteLevelAfter(splitStage(`\w+`))), `\\w+`},
		"behavior":          {top("pre_tokenizer", byteLevelAfter(map[string]any{"type": "Split", "pattern": map[string]any{"Regex": patternGPT2}, "behavior": "MergedWithNext"})), "MergedWithNext"},
		"string pattern":    {top("pre_tokenizer", byteLevelAfter(map[string]any{"type": "Split", "pattern": map[string]any{"String": " "}, "behavior": "Isolated"})), "Regex"},
		"null stage":        {top("pre_tokenizer", map[string]any{"type": "Sequence", "pretokenizers": []any{nil}}), "null"},
		"decoder":           {top("decoder", stage("WordPiece")), "decoder"},
		"empty vocabulary":  {set("model", "vocab", map[string]int{}), "vocab"},
		"vocabulary list":   {set("model", "vocab", []any{[]any{"a", -1.5}}), "vocab"},
		"negative id":       {set("model", "vocab", map[string]int{"a": -1}), `"a" has id -1`},
		"absurd id":         {set("model", "vocab", map[string]int{"a": 1e9}), `"a" has id 1000000000`},
		"same id":           {set("model", "vocab", map[string]int{"a": 1, "b": 1}), `"a" and "b" both`},
		"byte missing":      {func(m map[string]any) { delete(m["model"].(map[string]any)["vocab"].(map[string]int), "Ġ") }, "byte 0x20"},
		"merge of unknown":  {set("model", "merges", [][2]string{{"a", "zz"}}), `merge 0: "zz"`},
		"merge to unknown":  {set("model", "merges", []string{"q q"}), `merge 0: "qq"`},
		"merge of three":    {set("model", "merges", []string{"a b c"}), "merge 0 has 3"},
		"merges of numbers": {set("model", "merges", []int{1}), "merges"},
		"added id taken":    {addedToken(0, "<x>"), `"<x>" has id 0`},
		"added twice":       {addedToken(300, "<x>"), "both have id 300"},
		"added other id":    {addedToken(300, "a"), `"a" has id 300, but`},
		"added absurd":      {addedToken(-1, "<x>"), `"<x>" has id -1`},
		"added no id":       {addedToken(nil, "<x>"), "no id"},
	} {
		m := small()
		tc.change(m)
		path := put(t, "tokenizer.json", marshal(t, m))
		_, err := Open(path)
		require.ErrorContains(t, err, tc.want, name)
		require.ErrorContains(t, err, path, name)
		require.NotContains(t, err.Error(), "\n", name)
	}
	for spec, want := range map[string]string{
		"":                                "empty",
		"gpt3":                            "gpt3",
		t.TempDir():                       "regular",
		put(t, "t.json", nil):             "early",
		put(t, "t.json", []byte("[]")):    "not a tokenizer.json",
		put(t, "t.json", []byte("{}")):    "no model",
		put(t, "t.json", []byte(`{"a":`)): "early",
	} {
		_, err := Open(spec)
		require.ErrorContains(t, err, want)
	}
}

// TestSentencePieceFile checks which SentencePiece-style files are refused, and the decoded text of
// the tokens.
func TestSentencePieceFile(t *testing.T) {
	text, err := os.ReadFile("testdata/tokenizer-llama2.json")
	require.NoError(t, err)
	stage := func(kv ...string) map[string]any {
		m := map[string]any{}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i]] = kv[i+1]
		}
		return m
	}
	for want, change := range map[string]func(m map[string]any){
		"ignore_merges":                 func(m map[string]any) { m["model"].(map[string]any)["ignore_merges"] = true },
		`pre_tokenizer "Digits"`:        func(m map[string]any) { m["pre_tokenizer"] = stage("type", "Digits") },
		`replacement "_"`:               func(m map[string]any) { m["pre_tokenizer"] = stage("type", "Metaspace", "replacement", "_") },
		`prepend_scheme "second"`:       func(m map[string]any) { m["pre_tokenizer"] = stage("type", "Metaspace", "prepend_scheme", "second") },
		"nothing makes spaces":          func(m map[string]any) { m["normalizer"] = nil },
		"the decoder is not that":       func(m map[string]any) { m["decoder"] = stage("type", "ByteLevel") },
		"decoder is not that of a Sent": func(m map[string]any) { m["decoder"] = map[string]any{"type": "Sequence", "decoders": []any{nil}} },
		`no token for byte 0x0a`:        func(m map[string]any) { delete(m["model"].(map[string]any)["vocab"].(map[string]any), "<0x0A>") },
		`token "<s>" has id 99999`: func(m map[string]any) {
			m["post_processor"].(map[string]any)["special_tokens"].(map[string]any)["<s>"].(map[string]any)["ids"] = []int{99999}
		},
	} {
		var m map[string]any
		require.NoError(t, json.Unmarshal(text, &m))
		change(m)
		_, err := parse(marshal(t, m), nil)
		require.ErrorContains(t, err, want)
	}
	tok, err := parse(text, nil)
	require.NoError(t, err)
	for _, s := range []string{"the lazy dog", " 日本語\n\ttwo  three", "🎉"} {
		require.Equal(t, " "+s, tok.Decode(tok.Encode(s)), "the space put before a text stays, so that decoded parts concatenate")
	}
}

// TestOldTokenizerFile checks the older format: merges as lines and no types give the same
// tokenizer.
func TestOldTokenizerFile(t *testing.T) {
	m := tokenizerJSON(t, GPT2().(*bpeTokenizer).model, 2000, byteLevel, false, "</s>")
	want := load(t, m)
	model := m["model"].(map[string]any)
	var lines []string
	for _, p := range model["merges"].([][2]string) {
		lines = append(lines, p[0]+" "+p[1])
	}
	model["merges"] = lines
	delete(model, "type")
	delete(m, "decoder")
	got := load(t, m)
	text := "Spilling the merges, 123 of them's enough.\n"
	require.Equal(t, want.Encode(text), got.Encode(text))
	require.Equal(t, int32(2000), got.EOT())
	require.NotEqual(t, want.Name(), got.Name())
	require.Equal(t, []int32{2000}, got.Encode("</s>"))
	require.Equal(t, "</s>", got.Decode([]int32{2000}))
}

func FuzzTokenizerFile(f *testing.F) {
	// The smallest complete files: the bytes and a few merges.
	for _, pre := range []any{byteLevel, byteLevelAfter(splitStage(patternLlama3)), byteLevelAfter(map[string]any{"type": "Digits"})} {
		m := tokenizerJSON(f, GPT2().(*bpeTokenizer).model, 260, pre, true, "<|endoftext|>")
		m["normalizer"] = map[string]any{"type": "NFC"}
		f.Add(marshal(f, m), "Hello 'S 123 fooBar é\n")
	}
	pieces, err := os.ReadFile("testdata/tokenizer-metaspace.json")
	require.NoError(f, err)
	f.Add(pieces, "Hello  'S 123 <s>é\n")
	f.Fuzz(func(t *testing.T, file []byte, text string) {
		tok, err := parse(file, nil)
		if err != nil {
			require.NotContains(t, err.Error(), "\n")
			return
		}
		for _, id := range tok.Encode(text) {
			require.GreaterOrEqual(t, id, int32(0))
			require.Less(t, int(id), tok.VocabSize())
		}
	})
}

// FuzzRoundTrip checks that decoding the tokens of any valid text returns the text.
func FuzzRoundTrip(f *testing.F) {
	f.Add("Hello, world's  end\n\n 中文 123456")
	f.Fuzz(func(t *testing.T, text string) {
		if !utf8.ValidString(text) {
			return
		}
		tokens := GPT2().Encode(text)
		require.True(t, text == GPT2().Decode(tokens))
		sameTokens(t, encodeWith(t, codec.NewR50kBase(), text), tokens, text)
	})
}

func BenchmarkGPT2(b *testing.B) {
	var text strings.Builder
	files, _ := filepath.Glob("*.go")
	for _, f := range files {
		s, _ := os.ReadFile(f)
		text.Write(s)
	}
	s := text.String()
	b.Run("spillway", func(b *testing.B) {
		b.SetBytes(int64(len(s)))
		for b.Loop() {
			GPT2().Encode(s)
		}
	})
	b.Run("tiktoken-go", func(b *testing.B) {
		c := codec.NewR50kBase()
		b.SetBytes(int64(len(s)))
		for b.Loop() {
			c.Encode(s)
		}
	})
}

// TestMarkedTokens checks that the token found for a byte contains it, for each kind of tokenizer.
func TestMarkedTokens(t *testing.T) {
	text := "<s>Hello,  world's 123 日本語\n\n naïve</s>  end 🎉."
	for _, name := range []string{"gpt2", "llama3", "qwen2", "gpt4o", "llama2", "mistral", "metaspace"} {
		tok, err := Load("testdata/tokenizer-" + name + ".json")
		require.NoError(t, err)
		encode, err := Marking(tok)
		require.NoError(t, err)
		var marks []int
		for i := range text {
			marks = append(marks, i)
		}
		tokens, at := encode(text, marks)
		require.Equal(t, tok.Encode(text), tokens)
		require.Len(t, at, len(marks), name)
		for i, mark := range marks {
			if i > 0 {
				require.LessOrEqual(t, at[i-1], at[i])
			}
			one := tok.Decode(tokens[at[i] : at[i]+1])
			// The space that SentencePiece puts before a text belongs to the text's first byte.
			if c := text[mark]; c > ' ' && c < 0x80 && !strings.ContainsRune(one, rune(c)) && (tok.(*bpeTokenizer).meta == nil || one != " ") {
				t.Fatalf("%s: byte %d %q is not in token %q", name, mark, c, one)
			}
		}
	}
}

// TestALongWordIsMergedInParts encodes a word longer than twice longPiece. The merge buffers must
// stay bounded, and decoding must return the word.
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
