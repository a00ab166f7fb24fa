package pagoda

import pagodav1 "pagoda/clients/go/pagoda/v1"

// Message asks for the answer to a user's message, through the model's chat template.
func Message(text string) *pagodav1.GenerateRequest {
	return &pagodav1.GenerateRequest{Input: &pagodav1.GenerateRequest_Message{Message: text}}
}

// Prompt asks to continue a text as it stands.
func Prompt(text string) *pagodav1.GenerateRequest {
	return &pagodav1.GenerateRequest{Input: &pagodav1.GenerateRequest_Prompt{Prompt: text}}
}

// Chat asks for the answer to a conversation.
func Chat(messages ...*pagodav1.ChatMessage) *pagodav1.GenerateRequest {
	chat := &pagodav1.Chat{Messages: messages}
	return &pagodav1.GenerateRequest{Input: &pagodav1.GenerateRequest_Chat{Chat: chat}}
}

// JSON asks for an answer that matches a JSON Schema, which json.Unmarshal reads then.
func JSON(request *pagodav1.GenerateRequest, schema string) *pagodav1.GenerateRequest {
	request.Guided = &pagodav1.Guided{Format: &pagodav1.Guided_JsonSchema{JsonSchema: schema}}
	return request
}

// TokenIDs asks to continue token ids as they are.
func TokenIDs(ids ...uint32) *pagodav1.GenerateRequest {
	return &pagodav1.GenerateRequest{Input: &pagodav1.GenerateRequest_TokenIds{TokenIds: &pagodav1.TokenIds{Ids: ids}}}
}

// Texts asks for a vector of each text.
func Texts(texts ...string) *pagodav1.EmbedRequest {
	request := &pagodav1.EmbedRequest{}
	for _, text := range texts {
		input := &pagodav1.EmbedInput{Input: &pagodav1.EmbedInput_Text{Text: text}}
		request.Inputs = append(request.Inputs, input)
	}
	return request
}

// Continuations asks for the log-probabilities of texts that continue a prompt.
func Continuations(prompt string, texts ...string) *pagodav1.ScoreRequest {
	request := &pagodav1.ScoreRequest{Input: &pagodav1.ScoreRequest_Prompt{Prompt: prompt}}
	for _, text := range texts {
		continuation := &pagodav1.Continuation{Continuation: &pagodav1.Continuation_Text{Text: text}}
		request.Continuations = append(request.Continuations, continuation)
	}
	return request
}
