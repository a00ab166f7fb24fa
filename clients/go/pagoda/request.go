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
