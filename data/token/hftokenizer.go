package token

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spillway-ml/spillway/internal/regular"
)

const (
	// maxTokenizerBytes bounds a tokenizer.json; Llama 3's has 9 to 17 MB.
	maxTokenizerBytes = 256 << 20
	// maxTokens bounds its ids. It is several times the largest vocabularies.
	maxTokens = 1 << 22
)

// Load reads a Hugging Face tokenizer.json whose model is a BPE. It may be on bytes, such as
// GPT-2's, Llama 3's and Qwen 2's: pre-tokenizers ByteLevel, Digits and Split by their patterns,
// normalizer none or NFC, ignore_merges. Or it may be on characters with byte_fallback, like Llama
// 2's and Mistral's from SentencePiece: normalizers Prepend and Replace of spaces, or pre-tokenizer
// Metaspace. Other kinds (WordPiece, Unigram, another normalizer, pre-tokenizer or pattern) are
// refused by name. Their tokens would silently differ from those of the model's training.
//
// Encode gives the same tokens as the reference implementation without special tokens added; Prompt
// adds the start token before a text. Special tokens spelled in the text are recognized.
//
// The files beside a tokenizer.json name its special tokens (see Specials). Without them EOT is the
// special token called <|endoftext|>, <|end_of_text|>, </s>, <eos> or <|eot_id|>, the first that
// exists.
func Load(path string) (Tokenizer, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open tokenizer: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("open tokenizer: %s is not a regular file; it must be bytes, gpt2 or a tokenizer.json", path)
	}
	text, err := regular.ReadFile(path, maxTokenizerBytes)
	if err != nil {
		return nil, fmt.Errorf("open tokenizer: %w", err)
	}
	return Parse(path, text, readBeside(path))
}

// Parse is Load for the text of a file; path names it in errors. read returns
// the contents of a file in the same folder, or fails with fs.ErrNotExist. A nil read means
// there are no other files.
func Parse(path string, text []byte, read func(name string) ([]byte, error)) (Tokenizer, error) {
	t, err := parse(text, read)
	if err != nil {
		return nil, fmt.Errorf("open tokenizer %s: %w", path, err)
	}
	if t.isBytes() {
		return Bytes(), nil
	}
	return t, nil
}

// parse reads the text of a tokenizer.json.
func parse(text []byte, read func(name string) ([]byte, error)) (*bpeTokenizer, error) {
	var file struct {
		AddedTokens  []hfAdded `json:"added_tokens"`
		Normalizer   *hfStage  `json:"normalizer"`
		PreTokenizer *hfStage  `json:"pre_tokenizer"`
		Decoder      *hfStage  `json:"decoder"`
		Post         *hfPost   `json:"post_processor"`
		Model        *hfModel  `json:"model"`
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	if err := dec.Decode(&file); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, errors.New("the JSON ends early")
		}
		return nil, fmt.Errorf("it is not a tokenizer.json: %w", err)
	}
	if file.Model == nil {
		return nil, errors.New("it has no model; a tokenizer.json has one of type BPE")
	}
	t := &bpeTokenizer{name: fmt.Sprintf("tokenizer.json %x", sha256.Sum256(text))[:len("tokenizer.json ")+16], eot: -1, cuttable: true}
	// The model is checked before the other stages, so that another family of tokenizers is
	// refused by its most characteristic property.
	if err := checkModel(file.Model); err != nil {
		return nil, err
	}
	if err := t.addNormalizer(file.Normalizer); err != nil {
		return nil, err
	}
	pieces := file.Model.ByteFallback // as in SentencePiece
	switch d := file.Decoder; {
	case pieces && d != nil:
		if err := d.checkDecoder(0); err != nil {
			return nil, err
		}
	case pieces:
	case file.PreTokenizer == nil:
		return nil, errors.New("it has no pre_tokenizer; a byte-level BPE has ByteLevel")
	case d != nil && d.Type != "ByteLevel":
		return nil, fmt.Errorf("decoder %.80q is not supported; a byte-level BPE has ByteLevel", d.Type)
	}
	if !pieces {
		if err := t.byteLevel(file.PreTokenizer); err != nil {
			return nil, err
		}
	}
	vocab, err := decodeVocab(file.Model.Vocab)
	if err != nil {
		return nil, err
	}
	if t.model, err = newModel(file.Model, vocab); err != nil {
		return nil, err
	}
	if pieces {
		if err := t.addSentencePiece(file.Model, file.PreTokenizer, vocab); err != nil {
			return nil, err
		}
	}
	b, err := parseBeside(read)
	if err != nil {
		return nil, err
	}
	var notes []string
	more, err := b.moreAdded(file.AddedTokens, &notes)
	if err != nil {
		return nil, err
	}
	added, special, err := t.addTokens(more, vocab)
	if err != nil {
		return nil, err
	}
	if t.before, err = file.Post.start(len(t.model.tokens), 0); err != nil {
		return nil, err
	}
	if err := t.setSpecials(&b, vocab, added, special, notes); err != nil {
		return nil, err
	}
	// The name is only the hash of this file if the other files change no token.
	if changed := more[len(file.AddedTokens):]; len(changed) > 0 || t.eot != byName(special) {
		other, err := json.Marshal(changed)
		if err != nil {
			return nil, err
		}
		t.name += fmt.Sprintf(" %x", sha256.Sum256(fmt.Appendf(other, " %d", t.eot)))[:9]
	}
	return t, nil
}

// byteLevel adds the pre_tokenizer of a byte-level BPE, whose only possible normalizer is NFC.
func (t *bpeTokenizer) byteLevel(pre *hfStage) error {
	for _, n := range t.normalize {
		if !n.nfc {
			return errors.New("normalizers Prepend and Replace are supported only with byte_fallback: a byte-level BPE has none but NFC")
		}
	}
	return t.addPreTokenizers(pre)
}

func checkModel(m *hfModel) error {
	switch {
	case m.Type != "" && m.Type != "BPE":
		return fmt.Errorf("model type %q is not supported; it must be BPE", m.Type)
	case m.Type == "" && m.Merges == nil:
		return errors.New("the model has no type and no merges; it must be BPE")
	case m.Merges == nil:
		return errors.New("the model has no merges; a BPE has them")
	case m.Dropout != nil && *m.Dropout != 0:
		return fmt.Errorf("the model has dropout %g, which makes tokens random; it must be null", *m.Dropout)
	case m.Prefix != nil && *m.Prefix != "":
		return fmt.Errorf("the model has continuing_subword_prefix %q, which a byte-level BPE does not", *m.Prefix)
	case m.Suffix != nil && *m.Suffix != "":
		return fmt.Errorf("the model has end_of_word_suffix %q, which a byte-level BPE does not", *m.Suffix)
	}
	return nil
}

// addPreTokenizers adds the splitters of a pre_tokenizer. ByteLevel must be its last stage and
// occur once: a stage after it would see bytes spelled as other characters.
func (t *bpeTokenizer) addPreTokenizers(s *hfStage) error {
	var stages []*hfStage
	var flatten func(s *hfStage, depth int) error
	flatten = func(s *hfStage, depth int) error {
		if s == nil || depth > 8 {
			return errors.New("the pre_tokenizer's Sequence holds null, or is nested over 8 deep")
		}
		if s.Type != "Sequence" {
			stages = append(stages, s)
			return nil
		}
		for _, sub := range s.PreTokenizers {
			if err := flatten(sub, depth+1); err != nil {
				return err
			}
		}
		return nil
	}
	if err := flatten(s, 0); err != nil {
		return err
	}
	for i, s := range stages {
		last := i == len(stages)-1
		switch s.Type {
		case "ByteLevel":
			if !last {
				return fmt.Errorf("pre_tokenizer %q follows ByteLevel; ByteLevel must be the last", stages[i+1].Type)
			}
			var sp splitter
			if s.UseRegex == nil || *s.UseRegex {
				sp.first = splitGPT2
			}
			if s.AddPrefixSpace == nil || *s.AddPrefixSpace {
				sp.prefixSpace, t.cuttable = true, false
			}
			t.split = append(t.split, sp)
			return nil
		case "Digits":
			t.split = append(t.split, splitter{first: splitDigits(s.Individual)})
		case "Split":
			sp, err := s.splitter()
			if err != nil {
				return err
			}
			t.split = append(t.split, sp)
		default:
			return fmt.Errorf("pre_tokenizer %q is not supported; it must be ByteLevel, after Split or Digits if need be", s.Type)
		}
	}
	return errors.New("the pre_tokenizer has no ByteLevel; only byte-level BPE is supported")
}

func (s *hfStage) splitter() (splitter, error) {
	if s.Pattern == nil || s.Pattern.Regex == nil {
		return splitter{}, errors.New("pre_tokenizer Split has no pattern with a Regex")
	}
	// The known patterns match every part of a text. So it is the same to keep matches and the text
	// between them (Isolated), or to drop text that is not matched (Removed, inverted).
	if !(s.Behavior == "Isolated" && !s.Invert) && !(s.Behavior == "Removed" && s.Invert) {
		return splitter{}, fmt.Errorf("pre_tokenizer Split with behavior %q, invert %v is not supported; it must be Isolated, false", s.Behavior, s.Invert)
	}
	make, ok := patterns[*s.Pattern.Regex]
	if !ok {
		return splitter{}, fmt.Errorf("pre_tokenizer Split has pattern %.200q, which is none of GPT-2's, Llama 3's, Qwen 2's and GPT-4o's", *s.Pattern.Regex)
	}
	return make(), nil
}

// decodeVocab reads the vocabulary and checks that ids are distinct and in range.
func decodeVocab(text json.RawMessage) (map[string]int32, error) {
	var raw map[string]int64
	if err := json.Unmarshal(text, &raw); err != nil || len(raw) == 0 {
		return nil, errors.New("the model's vocab must be an object of token ids, not empty")
	}
	vocab := make(map[string]int32, len(raw))
	owner := make(map[int64]string, len(raw))
	for token, id := range raw {
		if id < 0 || id >= maxTokens {
			return nil, fmt.Errorf("token %q has id %d; it must be 0 to %d", token, id, maxTokens-1)
		}
		if first, ok := owner[id]; ok {
			return nil, fmt.Errorf("tokens %q and %q both have id %d", min(first, token), max(first, token), id)
		}
		owner[id] = token
		vocab[token] = int32(id)
	}
	return vocab, nil
}

// byteChars is GPT-2's spelling of bytes as printable characters. '!' to '~', U+00A1 to U+00AC and
// U+00AE to U+00FF spell themselves; the other bytes, in order, are U+0100 on.
var byteChars, charBytes = func() (chars [256]rune, bytes map[rune]byte) {
	bytes = map[rune]byte{}
	next := rune(0x100)
	for b := range chars {
		r := rune(b)
		if !('!' <= r && r <= '~' || 0xA1 <= r && r <= 0xAC || 0xAE <= r && r <= 0xFF) {
			r = next
			next++
		}
		chars[b], bytes[r] = r, byte(b)
	}
	return chars, bytes
}()

// unspell returns the bytes that a token spells, or the token unchanged if it has a character that
// spells no byte.
func unspell(token string) string {
	out := make([]byte, 0, len(token))
	for _, r := range token {
		b, ok := charBytes[r]
		if !ok {
			return token
		}
		out = append(out, b)
	}
	return string(out)
}

func newModel(h *hfModel, vocab map[string]int32) (*bpe, error) {
	m := &bpe{}
	if h.IgnoreMerges {
		m.whole = make(map[string]int32, len(vocab))
	}
	for token, id := range vocab {
		for int(id) >= len(m.tokens) {
			m.tokens = append(m.tokens, "")
		}
		if h.ByteFallback {
			m.tokens[id] = spelledAs(token)
		} else {
			m.tokens[id] = unspell(token)
		}
		if m.whole != nil {
			m.whole[m.tokens[id]] = id
		}
	}
	for b, r := range byteChars {
		spelling := string(r)
		if h.ByteFallback {
			spelling = fmt.Sprintf("<0x%02X>", b)
		}
		if id, ok := vocab[spelling]; ok {
			m.byteToken[b] = id
		} else {
			m.byteToken[b] = -1
		}
	}
	if err := m.checkBytes(); err != nil {
		return nil, err
	}
	pairs, err := decodeMerges(*h.Merges)
	if err != nil {
		return nil, err
	}
	m.merges = make(map[uint64]merge, len(pairs))
	for i, p := range pairs {
		left, okLeft := vocab[p[0]]
		right, okRight := vocab[p[1]]
		joined, okJoined := vocab[p[0]+p[1]]
		switch {
		case !okLeft:
			return nil, fmt.Errorf("merge %d: %q is not in the vocabulary", i, p[0])
		case !okRight:
			return nil, fmt.Errorf("merge %d: %q is not in the vocabulary", i, p[1])
		case !okJoined:
			return nil, fmt.Errorf("merge %d: %q, which it makes of %q and %q, is not in the vocabulary", i, p[0]+p[1], p[0], p[1])
		}
		// If a pair is given twice, the last one counts, as in the reference.
		m.merges[pairKey(left, right)] = merge{int32(i), joined}
	}
	return m, nil
}

// decodeMerges reads pairs as ["a", "b"] or, as before 2024, "a b".
func decodeMerges(text json.RawMessage) ([][2]string, error) {
	var pairs [][]string
	if err := json.Unmarshal(text, &pairs); err != nil {
		var lines []string
		if err := json.Unmarshal(text, &lines); err != nil {
			return nil, errors.New(`the model's merges must all be pairs ["a", "b"], or all strings "a b"`)
		}
		pairs = pairs[:0]
		for _, line := range lines {
			pairs = append(pairs, strings.Split(line, " "))
		}
	}
	if len(pairs) > math.MaxInt32-1 {
		return nil, fmt.Errorf("the model has %d merges", len(pairs))
	}
	out := make([][2]string, len(pairs))
	for i, p := range pairs {
		if len(p) != 2 {
			return nil, fmt.Errorf("merge %d has %d parts; it must have 2", i, len(p))
		}
		out[i] = [2]string{p[0], p[1]}
	}
	return out, nil
}

// addTokens adds the added tokens. It returns the ids of all of them and of the special ones,
// by content.
func (t *bpeTokenizer) addTokens(list []hfAdded, vocab map[string]int32) (all, special map[string]int32, err error) {
	var raw, normed []added
	owner := map[int64]string{}
	all, special = map[string]int32{}, map[string]int32{}
	names := make(map[int32]string, len(vocab))
	for token, id := range vocab {
		names[id] = token
	}
	for i, a := range list {
		if a.ID == nil || a.Content == nil {
			return nil, nil, fmt.Errorf("added token %d has no id or no content", i)
		}
		content, id := *a.Content, *a.ID
		if content == "" {
			continue
		}
		if id < 0 || id >= maxTokens {
			return nil, nil, fmt.Errorf("added token %q has id %d; it must be 0 to %d", content, id, maxTokens-1)
		}
		if known, ok := vocab[content]; ok && int64(known) != id {
			return nil, nil, fmt.Errorf("added token %q has id %d, but %d in the vocabulary", content, id, known)
		}
		if other, ok := names[int32(id)]; ok && other != content {
			return nil, nil, fmt.Errorf("added token %q has id %d, which is %q in the vocabulary", content, id, other)
		}
		if other, ok := owner[id]; ok && other != content {
			return nil, nil, fmt.Errorf("added tokens %q and %q both have id %d", other, content, id)
		}
		owner[id] = content
		for int(id) >= len(t.model.tokens) {
			t.model.tokens = append(t.model.tokens, "")
		}
		t.model.tokens[id] = content
		all[content] = int32(id)
		if a.Special {
			special[content] = int32(id)
		}
		entry := added{content, int32(id), a.SingleWord, a.LStrip, a.RStrip}
		if a.Normalized != nil && *a.Normalized || a.Normalized == nil && !a.Special {
			entry.content = t.normalized(content, false)
			normed = append(normed, entry)
		} else {
			raw = append(raw, entry)
		}
		// A token that matches across a cut, or depends on the text beyond it, would differ
		// when the text is encoded in parts.
		if a.SingleWord || a.RStrip || strings.ContainsAny(content, " \t\r\n") {
			t.cuttable = false
		}
		// After this token a space may be inserted. A text that continues after a cut would not
		// get it.
		if r, _ := utf8.DecodeLastRuneInString(content); t.meta != nil && unicode.In(r, unicode.L, unicode.N) {
			t.cuttable = false
		}
	}
	t.raw, t.normed = newAddedSet(raw), newAddedSet(normed)
	return all, special, nil
}
